"""What the metrics count between one status and the next: each thing once, and nothing that did not happen."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.scrape import counted, value
from tests.unit.statuses import at, condition, failure, goodput, ready, status, waiting
from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import AttemptStart, ChipSeconds, Restarts, State, Status
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.metrics.transitions import unready_since

ONE, TWO = JobKey("default", "one"), JobKey("default", "two")
THEIRS = JobKey("team-a", "one")
HANG, PREEMPTION = FailureClass.HANG, FailureClass.PREEMPTION


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


# States


def test_a_job_is_counted_in_its_latest_state(metrics: Metrics) -> None:
    metrics.job_seen(ONE, State.STARTING)
    metrics.job_seen(TWO, State.STARTING)
    metrics.job_seen(ONE, State.RUNNING)
    assert counted(metrics, "tpujob_jobs", "state") == {"Running": 1, "Starting": 1}


def test_a_job_without_a_status_is_new(metrics: Metrics) -> None:
    metrics.job_seen(ONE, None)
    assert counted(metrics, "tpujob_jobs", "state") == {"New": 1}


def test_jobs_restarts_and_chips_are_counted_by_namespace(metrics: Metrics) -> None:
    for key, hangs in ((ONE, 1), (THEIRS, 2)):
        metrics.job_seen(key, State.RUNNING)
        after = status(
            restarts=Restarts(by_class={HANG: hangs}),
            goodput=replace(goodput(90), chip_seconds=ChipSeconds(wasted=100 * hangs, since=at(90))),
        )
        metrics.status_written(key, status(attempt=0), after)
    assert counted(metrics, "tpujob_jobs", "job_namespace") == {"default": 1, "team-a": 1}
    assert counted(metrics, "tpujob_restarts_total", "job_namespace") == {"default": 1, "team-a": 2}
    assert counted(metrics, "tpujob_chip_seconds_total", "job_namespace") == {"default": 100, "team-a": 200}


def test_namespaces_beyond_the_first_ones_share_a_series() -> None:
    metrics = Metrics(namespaces=1)
    metrics.jobs_listed({ONE: State.RUNNING, THEIRS: State.RUNNING, JobKey("team-b", "one"): State.RUNNING})
    assert counted(metrics, "tpujob_jobs", "job_namespace") == {"default": 1, "<other>": 2}
    metrics.jobs_listed({TWO: State.RUNNING, THEIRS: State.RUNNING})
    assert counted(metrics, "tpujob_jobs", "job_namespace") == {"default": 1, "<other>": 1}


def test_the_series_of_a_namespace_begin_at_0_with_its_first_job(metrics: Metrics) -> None:
    metrics.job_seen(THEIRS, None)
    assert value(metrics, "tpujob_restarts_total", job_namespace="team-a", class_="Hang") == 0
    assert value(metrics, "tpujob_chip_seconds_total", job_namespace="team-a", account="wasted") == 0


def test_a_deleted_job_is_not_counted(metrics: Metrics) -> None:
    metrics.job_seen(ONE, State.RUNNING)
    metrics.job_gone(ONE)
    metrics.job_gone(ONE)
    assert counted(metrics, "tpujob_jobs", "state") == {}


def test_a_listing_replaces_all_that_was_known(metrics: Metrics) -> None:
    """After a restart of the operator nothing is known, and deletions may have gone unheard."""
    metrics.job_seen(ONE, State.RUNNING)
    metrics.jobs_listed({TWO: State.FAILED})
    assert counted(metrics, "tpujob_jobs", "state") == {"Failed": 1}


def test_the_longest_wait_for_workers_continues_through_restarts() -> None:
    now = 100.0
    metrics = Metrics(lambda: now)
    metrics.job_seen(ONE, None)
    now += 10
    metrics.job_seen(ONE, State.STARTING)
    metrics.job_seen(TWO, State.STARTING)
    now += 20
    metrics.job_seen(ONE, State.RESTARTING)
    assert value(metrics, "tpujob_longest_unready_seconds") == 30


def test_a_new_process_knows_for_how_long_a_job_has_waited() -> None:
    now = 100.0
    metrics = Metrics(lambda: now)
    metrics.jobs_listed({ONE: State.STARTING})
    metrics.job_seen(ONE, State.STARTING, unready_seconds=3600)
    now += 10
    assert value(metrics, "tpujob_longest_unready_seconds") == 3610


CREATED = -30


@pytest.mark.parametrize(
    ("seen", "since"),
    [
        (Status(), CREATED),
        (status(), 0),
        (waiting(90), 90),
        (ready(90), 0),
        (status(conditions=[condition(ConditionType.SUSPENDED, False, 50)]), 50),
        (status(conditions=[condition(ConditionType.SUSPENDED, True, 50)]), 0),
        (status(conditions=[condition(ConditionType.ADMITTED, True, 70)]), 70),
    ],
    ids=["created", "started", "failed", "ready", "resumed", "suspended", "admitted"],
)
def test_a_job_waits_since_the_last_time_that_it_began_to(seen: Status, since: int) -> None:
    noon = parse_time(at(0))
    assert unready_since(seen, noon + timedelta(seconds=CREATED)) == noon + timedelta(seconds=since)


@pytest.mark.parametrize("state", sorted(set(State) - {State.STARTING, State.RESTARTING}))
def test_a_job_that_does_not_wait_for_workers_is_not_unready(state: State) -> None:
    now = 100.0
    metrics = Metrics(lambda: now)
    metrics.job_seen(ONE, State.STARTING)
    metrics.job_seen(ONE, state)
    now += 10
    assert value(metrics, "tpujob_longest_unready_seconds") == 0


def test_a_deleted_job_is_not_unready() -> None:
    now = 100.0
    metrics = Metrics(lambda: now)
    metrics.job_seen(ONE, State.STARTING)
    metrics.job_gone(ONE)
    now += 10
    assert value(metrics, "tpujob_longest_unready_seconds") == 0


# Failures, restarts, the end, and where the time went


def failed(reason: Reason, **fields: object) -> Status:
    end = condition(ConditionType.FAILED, True, 100, reason)
    return status(completion_time=at(100), conditions=[end], **fields)


def succeeded(**fields: object) -> Status:
    end = condition(ConditionType.SUCCEEDED, True, 100, Reason.ALL_WORKERS_SUCCEEDED)
    return status(completion_time=at(100), conditions=[end], **fields)


RATIO = replace(goodput(100, productive=60, start=40), ratio="0.600")
UNSAVED = goodput(90, productive=90, unsaved=60)
LATER = goodput(90, queue=40, start=30, recovery=15, suspended=5)
COUNTS: dict[str, tuple[Status, Status, str, dict[str, float]]] = {
    "restarts by their difference": (
        status(restarts=Restarts(by_class={HANG: 2})),
        status(restarts=Restarts(by_class={HANG: 3, PREEMPTION: 1})),
        "restarts",
        {"Hang": 1, "Preemption": 1},
    ),
    "a failure by its class": (status(), status(last_failure=failure(1, 60, HANG)), "failures", {"Hang": 1}),
    "a failure that is reworded, once": (
        status(last_failure=failure(1, 60)),
        status(last_failure=failure(1, 59, PREEMPTION)),
        "failures",
        {},
    ),
    "a denied restart exhausts the limit": (
        status(last_failure=failure(3, 30)),
        failed(Reason.RESTART_LIMIT_REACHED, last_failure=failure(4, 60, HANG)),
        "restarts_exhausted",
        {"Hang": 1},
    ),
    "a deadline exhausts none": (
        status(),
        failed(Reason.DEADLINE_EXCEEDED, last_failure=failure(1, 60)),
        "restarts_exhausted",
        {},
    ),
    "a job that failed by the reason": (status(), failed(Reason.STEP_TOO_LARGE), "finished", {"StepTooLarge": 1}),
    "a job that succeeded": (status(), succeeded(), "finished", {"AllWorkersSucceeded": 1}),
    "an end once": (succeeded(), succeeded(observed_generation=2), "finished", {}),
    "time goes to its account": (
        status(goodput=goodput(60, queue=40, start=20)),
        status(goodput=LATER),
        "goodput_seconds",
        {"start": 10, "recovery": 15, "suspended": 5},
    ),
    "training that no checkpoint holds is not productive yet": (
        status(),
        status(goodput=UNSAVED),
        "goodput_seconds",
        {"productive": 30},
    ),
    "lost training is wasted only": (
        status(goodput=UNSAVED),
        status(goodput=goodput(90, productive=30, wasted=60)),
        "goodput_seconds",
        {"wasted": 60},
    ),
    "at the end all kept training is productive": (
        status(goodput=UNSAVED),
        succeeded(goodput=UNSAVED),
        "goodput_seconds",
        {"productive": 60},
    ),
}


@pytest.mark.parametrize(("before", "after", "counter", "counts"), COUNTS.values(), ids=COUNTS)
def test_a_written_status_is_counted_by_what_it_changes(
    metrics: Metrics, before: Status, after: Status, counter: str, counts: dict[str, float]
) -> None:
    metrics.status_written(ONE, before, after)
    label = {"finished": "reason", "goodput_seconds": "account"}.get(counter, "class")
    assert counted(metrics, f"tpujob_{counter}_total", label) == counts


@pytest.mark.parametrize(("after", "observed"), [(succeeded(goodput=RATIO), 0.6), (status(goodput=RATIO), 0)])
def test_the_goodput_of_a_job_is_observed_at_its_end(metrics: Metrics, after: Status, observed: float) -> None:
    metrics.status_written(ONE, status(), after)
    assert value(metrics, "tpujob_goodput_ratio_sum") == observed


def a_start(attempt: int = 2, total: int | None = 30, cause: str = "Hang") -> AttemptStart:
    seconds = {"noticed": 2, "bound": 8, "imports": 20}
    return AttemptStart(attempt=attempt, cause=cause, since=at(60), seconds=seconds, total_seconds=total)


@pytest.mark.parametrize(
    ("before", "after", "starts"),
    [
        ([], [a_start()], 1),
        ([a_start(1), a_start(total=None)], [a_start(1), a_start()], 1),
        ([a_start(total=None)], [a_start(total=None)], 0),
        ([a_start()], [a_start()], 0),
        ([a_start()], [], 0),
        ([a_start()], [a_start(), a_start(3, None)], 0),
        # The worker failed before its first step was written.
        ([a_start(total=None)], [a_start(), a_start(3, None)], 1),
    ],
)
def test_a_start_is_counted_with_its_first_step(
    metrics: Metrics, before: list[AttemptStart], after: list[AttemptStart], starts: int
) -> None:
    metrics.status_written(ONE, status(starts=before), status(starts=after))
    assert value(metrics, "tpujob_starts_total", after="failure") == starts
    assert value(metrics, "tpujob_starts_total", after="other") == 0
    for phase, seconds in {"noticed": 2, "bound": 8, "imports": 20, "compiled": 0}.items():
        counted_seconds = value(metrics, "tpujob_start_seconds_total", after="failure", phase=phase)
        assert counted_seconds == starts * seconds


@pytest.mark.parametrize("cause", Reason)
def test_a_start_that_no_failure_caused_is_counted_apart(metrics: Metrics, cause: Reason) -> None:
    metrics.status_written(ONE, status(), status(starts=[a_start(cause=cause)]))
    assert value(metrics, "tpujob_starts_total", after="other") == 1
    assert value(metrics, "tpujob_start_seconds_total", after="other", phase="imports") == 20


# Starts and recoveries


READINESS = [
    ("the first attempt", waiting(0), ready(95), (95, None)),
    ("a start whose first attempt failed", waiting(0, last_failure=failure(1, 40)), ready(95), (95, None)),
    ("a gang that was never seen waiting", status(), ready(95), (95, None)),
    ("a recovery", waiting(61, last_failure=failure(1, 60)), ready(95), (None, 35)),
    ("a recovery that took three attempts", waiting(61, last_failure=failure(3, 80)), ready(95), (None, 34)),
    ("a gang that stays ready", ready(95), ready(95), (None, None)),
    ("a gang that fails", ready(95), waiting(100), (None, None)),
    ("a gang that waits on", waiting(0), waiting(0), (None, None)),
]


@pytest.mark.parametrize(
    ("before", "after", "seconds"), [row[1:] for row in READINESS], ids=[row[0] for row in READINESS]
)
def test_a_gang_that_gets_ready_has_started_or_recovered(
    metrics: Metrics, before: Status, after: Status, seconds: tuple[float | None, float | None]
) -> None:
    after = replace(after, last_failure=before.last_failure)
    metrics.status_written(ONE, before, after)
    assert observed(metrics) == seconds


def test_a_start_after_a_suspension_counts_from_there(metrics: Metrics) -> None:
    resumed = condition(ConditionType.SUSPENDED, False, 1000)
    before = status(conditions=[condition(ConditionType.GANG_READY, False, 300), resumed])
    after = status(conditions=[condition(ConditionType.GANG_READY, True, 1040), resumed])
    metrics.status_written(ONE, before, after)
    assert observed(metrics) == (40, None)


def test_a_recovery_after_a_suspension_counts_from_the_failure(metrics: Metrics) -> None:
    resumed = condition(ConditionType.SUSPENDED, False, 1000)
    before = status(conditions=[condition(ConditionType.GANG_READY, False, 2001), resumed])
    after = status(conditions=[condition(ConditionType.GANG_READY, True, 2010), resumed], last_failure=failure(2, 2000))
    metrics.status_written(ONE, before, after)
    assert observed(metrics) == (None, 10)


class_counts = st.dictionaries(st.sampled_from(FailureClass), st.integers(0, 100))


@settings(max_examples=30)
@given(lives=st.lists(class_counts, max_size=5))
def test_however_many_writes_the_restarts_add_up(lives: list[dict[FailureClass, int]]) -> None:
    """Two operators write in turns, and each counts its own steps: together they have counted what there was."""
    operators = Metrics(), Metrics()
    total: dict[FailureClass, int] = {}
    before = status()
    for turn, more in enumerate(lives):
        total = {name: total.get(name, 0) + more.get(name, 0) for name in FailureClass}
        after = status(restarts=Restarts(by_class=dict(total)))
        operators[turn % 2].status_written(ONE, before, after)
        before = after
    counts = [counted(one, "tpujob_restarts_total", "class") for one in operators]
    assert {name: sum(one.get(name, 0) for one in counts) for name in total} == total


def observed(metrics: Metrics) -> tuple[float | None, float | None]:
    """The seconds of the only start and of the only recovery; None where there was none."""

    def only(name: str) -> float | None:
        count = value(metrics, f"{name}_count")
        assert count <= 1
        return value(metrics, f"{name}_sum") if count else None

    return only("tpujob_gang_ready_seconds"), only("tpujob_recovery_seconds")
