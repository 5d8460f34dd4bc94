"""Where the time of a job went: every second is in one of the sums, whatever happens."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pods import NOON, at, pod, seen, time_at
from tpu_training_operator.api.status import Activity, Goodput
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, parse_time
from tpu_training_operator.domain.plan.common.accounts import (
    active_seconds,
    charge,
    mark_lost,
    mark_saved,
    settle,
    start_goodput,
)

SUMS = {
    Activity.QUEUE: "queue",
    Activity.START: "start",
    Activity.TRAIN: "productive",
    Activity.RECOVERY: "recovery",
    Activity.SUSPENDED: "suspended",
}


def total(goodput: Goodput) -> int:
    sums = [*SUMS.values(), "wasted"]
    return sum(getattr(goodput, name) for name in sums)


def doing(activity: Activity) -> Goodput:
    return Goodput(activity=activity, since=time_at(0))


def worker(host: int = 0, *, created: float, placed: float | None = None) -> WorkerPod:
    body = pod(host, node="" if placed is None else f"node-{host}")
    body["metadata"]["creationTimestamp"] = time_at(created)
    if placed is not None:
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": time_at(placed)}
        body["status"]["conditions"] = [scheduled]
    return seen(body)[0]


@pytest.mark.parametrize(("activity", "name"), SUMS.items(), ids=str)
def test_time_goes_to_what_the_job_was_doing(activity: Activity, name: str) -> None:
    after = charge(doing(activity), at(7), Activity.START)
    assert (getattr(after, name), total(after)) == (7, 7)
    assert (after.activity, after.since) == (Activity.START, time_at(7))


def test_a_clock_that_is_set_back_takes_no_time_back() -> None:
    after = charge(doing(Activity.TRAIN), at(-60), Activity.RECOVERY)
    assert after == doing(Activity.RECOVERY)


def test_fractions_of_a_second_are_carried_over() -> None:
    goodput = doing(Activity.TRAIN)
    for tenths in range(0, 101, 4):
        goodput = charge(goodput, at(tenths / 10), Activity.TRAIN)
    assert (goodput.productive, goodput.since) == (10, time_at(10))


def test_a_finished_job_is_charged_no_more_time() -> None:
    finished = charge(doing(Activity.TRAIN), at(10), Activity.FINISHED)
    assert charge(finished, at(99), Activity.FINISHED) == finished


def test_what_no_checkpoint_holds_is_lost() -> None:
    trained = charge(mark_saved(charge(doing(Activity.TRAIN), at(60), Activity.TRAIN)), at(100), Activity.TRAIN)
    assert (trained.productive, trained.unsaved) == (100, 40)
    after = mark_lost(trained)
    assert (after.productive, after.wasted, after.unsaved) == (60, 40, 0)
    assert after.ratio == "0.600"


def test_the_ratio_leaves_suspensions_out() -> None:
    trained = charge(doing(Activity.TRAIN), at(30), Activity.SUSPENDED)
    resumed = charge(trained, at(1000), Activity.QUEUE)
    assert charge(resumed, at(1090), Activity.TRAIN).ratio == "0.250"


def test_neither_the_queue_nor_a_suspension_is_active_time() -> None:
    goodput = Goodput(
        queue=1,
        start=10,
        productive=100,
        wasted=1000,
        recovery=10_000,
        suspended=100_000,
        since=time_at(0),
    )
    assert active_seconds(goodput) == 11_110


@pytest.mark.parametrize(
    ("before", "workers", "queue", "start", "recovery"),
    [
        (Activity.QUEUE, [], 100, 0, 0),
        (Activity.QUEUE, [worker(created=10)], 100, 0, 0),
        (Activity.QUEUE, [worker(created=10, placed=30)], 30, 70, 0),
        (Activity.QUEUE, [worker(0, created=10, placed=30), worker(1, created=10)], 100, 0, 0),
        (Activity.QUEUE, [worker(0, created=10, placed=30), worker(1, created=10, placed=90)], 90, 10, 0),
        (Activity.RECOVERY, [], 0, 0, 100),
        (Activity.RECOVERY, [worker(created=10)], 90, 0, 10),
        (Activity.RECOVERY, [worker(created=10, placed=30)], 20, 0, 80),
        (Activity.RECOVERY, [worker(0, created=10, placed=30), worker(1, created=20, placed=50)], 30, 0, 70),
        (Activity.START, [worker(created=10, placed=30)], 0, 100, 0),
    ],
)
def test_from_its_creation_until_its_last_worker_has_a_node_the_gang_waits_in_the_queue(
    before: Activity, workers: list[WorkerPod], queue: int, start: int, recovery: int
) -> None:
    after = settle(doing(before), workers, at(100))
    assert (after.queue, after.start, after.recovery) == (queue, start, recovery)
    assert total(after) == 100


@pytest.mark.parametrize("before", [Activity.QUEUE, Activity.RECOVERY])
def test_settling_in_steps_equals_settling_at_once(before: Activity) -> None:
    times = [(10, 30), (20, 50)]
    stepwise = doing(before)
    for second in range(0, 101, 7):
        there = all(created <= second for created, _ in times)
        gang = [worker(host, created=c, placed=p if p <= second else None) for host, (c, p) in enumerate(times)]
        stepwise = settle(stepwise, gang if there else [], at(second))
    gang = [worker(host, created=created, placed=placed) for host, (created, placed) in enumerate(times)]
    assert settle(stepwise, gang, at(100)) == settle(doing(before), gang, at(100))


_moments = st.integers(-100, 1000)
_worker = st.tuples(_moments, st.none() | _moments).map(lambda times: worker(created=times[0], placed=times[1]))
_steps = st.one_of(
    st.tuples(st.just("charge"), _moments, st.sampled_from(sorted(SUMS))),
    st.tuples(st.just("settle"), _moments, st.lists(_worker, max_size=3)),
    st.tuples(st.sampled_from(["saved", "lost"])),
)


@given(st.lists(_steps, max_size=30), _moments)
def test_the_sums_always_add_up_and_only_grow(steps: list[tuple], end: int) -> None:
    goodput = start_goodput(time_at(0))
    for kind, *arguments in steps:
        before = goodput
        match kind:
            case "charge":
                goodput = charge(goodput, at(arguments[0]), arguments[1])
            case "settle":
                goodput = settle(goodput, arguments[1], at(arguments[0]))
            case "saved":
                goodput = mark_saved(goodput)
            case "lost":
                goodput = mark_lost(goodput)
        assert total(goodput) == (parse_time(goodput.since) - NOON).total_seconds()
        assert parse_time(goodput.since) >= parse_time(before.since)
        assert 0 <= goodput.unsaved <= goodput.productive
        trained = [g.productive + g.wasted for g in (before, goodput)]
        assert trained[0] <= trained[1]
        others = ("queue", "start", "wasted", "recovery", "suspended")
        assert all(getattr(before, name) <= getattr(goodput, name) for name in others)
    finished = charge(goodput, at(end), Activity.FINISHED)
    assert total(finished) == max(end, int((parse_time(goodput.since) - NOON).total_seconds()))


def test_a_new_job_has_waited_since_it_was_created() -> None:
    goodput = start_goodput("2026-01-15T12:00:00.25Z")
    assert charge(goodput, NOON + timedelta(seconds=9.9), Activity.START).queue == 9
