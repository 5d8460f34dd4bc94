"""No pass may fail over a time that the API server accepts in a status."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.operators import look
from tests.planner.story import given_a_running_gang
from tests.unit.jobs import job_body
from tests.unit.pods import NOON, at
from tpu_training_operator.api.status import Activity, Goodput, Status
from tpu_training_operator.domain.cluster_state.observed import EARLIEST, LATEST, Observed, format_time, parse_time
from tpu_training_operator.domain.plan.common.accounts import charge
from tpu_training_operator.domain.plan.common.conditions import JobState
from tpu_training_operator.domain.plan.stopping.departure import delete_when_due, stop_remaining_pods


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-03-01T12:00:00Z", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("2026-03-01t12:00:00z", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("2026-03-01T12:00:00", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("2026-03-01T12:00:00.123456789Z", datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)),
        ("2026-03-01T12:00:00+02:00", datetime(2026, 3, 1, 10, tzinfo=UTC)),
        ("2026-03-01T12:00:00+99:99", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("2026-03-01T12:00:00x5Z", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("9999-12-31T23:59:59Z", LATEST),
        ("9999-12-31T23:59:59-12:00", LATEST),
        ("0001-01-01T00:00:00+12:00", EARLIEST),
        ("0000-01-01T00:00:00Z", EARLIEST),
    ],
)
def test_a_time_that_an_api_server_accepts_is_read(text: str, moment: datetime) -> None:
    assert (parse_time(text), parse_time(text).tzinfo) == (moment, UTC)


def test_what_is_not_a_time_is_refused() -> None:
    with pytest.raises(ValueError, match="yesterday"):
        parse_time("yesterday")


_zone = st.sampled_from(["Z", "z", "", "+00:00", "-23:59", "+23:59", "+14:00", "+99:99"])
_text = st.builds(
    lambda moment, year, t, fraction, zone: f"{year:04}-{moment:%m-%d}{t}{moment:%H:%M:%S}{fraction}{zone}",
    # Not a leap year: every other year has all of its days.
    st.datetimes(datetime(2023, 1, 1), datetime(2023, 12, 31, 23, 59, 59)),
    st.sampled_from([0, 1, 2, 1969, 1970, 2025, 2199, 2200, 9999]) | st.integers(0, 9999),
    st.sampled_from("Tt"),
    st.sampled_from(["", ".5", ".123456789"]),
    _zone,
)


@given(_text)
def test_any_time_is_within_bounds_and_written_as_it_is_read(text: str) -> None:
    moment = parse_time(text)
    assert EARLIEST <= moment <= LATEST
    assert parse_time(format_time(moment)) == moment.replace(microsecond=0)


@given(_text, st.integers(-(10**18), 10**18))
def test_no_time_in_a_status_stops_the_pass_over_a_finished_job(text: str, ttl: int) -> None:
    job = job_body({"spec.runPolicy": {"ttlSecondsAfterFinished": ttl}, "status": {"completionTime": text}})
    look = JobState(Observed.of(job, []), Status.read(job["status"]), NOON)
    assert delete_when_due(look) or stop_remaining_pods(look)


@given(_text)
def test_goodput_may_begin_at_any_time(text: str) -> None:
    after = charge(Goodput(activity=Activity.TRAIN, since=text), at(60), Activity.RECOVERY)
    assert after.productive >= 0


def test_no_time_in_a_status_stops_the_pass_over_a_gang_that_runs() -> None:
    for text in ("0000-01-01T00:00:00Z", "0001-01-01t00:00:00", "2026-03-01T12:00:00", "9999-12-31T23:59:59-23:59"):
        cluster = given_a_running_gang(listens=True)
        status = cluster.job["status"]
        status["progress"] = {"step": 1, "totalSteps": 9, "phase": "Training", "lastReportTime": text}
        status["progress"]["lastAdvanceTime"] = status["startTime"] = text
        status["restarts"] = {"charged": {"UserError": [text]}, "nextAttemptTime": text}
        status["deviceFaults"] = [{"node": "node-0", "time": text}]
        status["goodput"] = (status.get("goodput") or {}) | {"since": text}
        for condition in status["conditions"]:
            condition["lastTransitionTime"] = text
        look(cluster)


def test_a_year_is_written_with_four_digits() -> None:
    assert format_time(datetime(1, 1, 1, tzinfo=UTC) + timedelta(seconds=1)) == "0001-01-01T00:00:01Z"
