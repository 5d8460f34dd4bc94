"""Which worker is to blame for a gang that went down."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ended_pods import START_ERRORS
from tests.unit.kubelet_statuses import FailedPod, container, exited, held_up, of_host, placed, running
from tests.unit.pods import NOON, at, deleted, disrupted, ended, pod, ready, seen, time_at, with_status
from tests.unit.stuck_pods import DENIED, STUCK, backs_off
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.failures.first import SETTLE, first_failure, hang_failure, missing_worker, next_look
from tpu_training_operator.domain.job.naming import WorkerId

LATER = NOON + 10 * SETTLE


def failure_of(*bodies: dict[str, Any], own_loop: bool = False) -> Failure:
    found = first_failure(seen(*bodies), 1, LATER, settle_user_errors=own_loop)
    assert found is not None
    return found


def test_a_failure_says_where_and_when_it_happened() -> None:
    found = failure_of(ended(pod(3, slice_index=2, node="tpu-node-7"), 1, after=4))
    assert (found.pod, found.slice, found.host, found.node) == ("digits-1-2-3", 2, 3, "tpu-node-7")
    assert (found.attempt, found.exit_code, found.time) == (1, 1, time_at(4))


@pytest.mark.parametrize(
    ("bodies", "culprit"),
    [
        pytest.param([ended(pod(0), 137, after=9), ended(pod(1), 137, after=2)], 1, id="the earliest"),
        pytest.param([ended(pod(2), 137, after=2), ended(pod(1), 137, after=2)], 1, id="the lowest of the same second"),
        pytest.param([ended(pod(0), 69, after=1), ended(pod(1), 1, after=9)], 1, id="who lost a peer is not the cause"),
        pytest.param([ended(pod(0), 69, after=3), ended(pod(1), 69, after=2)], 1, id="only losers: the earliest"),
        pytest.param(
            [ended(pod(0), 1, after=4), deleted(ready(pod(1)), after=2, grace=30)],
            1,
            id="a deletion counts from when it was asked for",
        ),
        pytest.param(
            [ended(pod(0), 1, after=4), deleted(ended(pod(1), 143, after=20), after=2)],
            1,
            id="also when the deleted worker takes its time to stop",
        ),
        pytest.param(
            [ended(pod(0), 1, after=4), disrupted(ended(pod(1), 143, after=20), "PreemptionByScheduler", after=2)],
            1,
            id="a disruption counts from when it was decided",
        ),
        pytest.param(
            [deleted(ended(pod(0), 1, after=2), after=5), ended(pod(1), 137, after=4)],
            0,
            id="a failed pod that is deleted afterwards failed first",
        ),
        pytest.param([ended(pod(0), 0, after=1), ended(pod(1), 3, after=9)], 1, id="success is not a failure"),
        pytest.param([deleted(ended(pod(0), 0), after=8), ended(pod(1), 3, after=9)], 1, id="nor is its deletion"),
    ],
)
def test_the_worker_that_failed_first_is_the_cause(bodies: list[dict[str, Any]], culprit: int) -> None:
    assert failure_of(*bodies).host == culprit


def test_whether_a_killed_worker_lacked_memory_is_known_once_its_pod_has_ended() -> None:
    killed = ended(pod(0), 137)
    early = with_status(killed, phase="Running")
    assert first_failure(seen(early, ready(pod(1))), 1, at(1), settle_user_errors=False) is None
    assert next_look(seen(early, ready(pod(1))), at(1)) == SETTLE - (at(1) - NOON)
    found = [first_failure(seen(early), 1, NOON + SETTLE, settle_user_errors=False)]
    found.append(first_failure(seen(killed), 1, at(1), settle_user_errors=False))
    assert [failure.reason for failure in found if failure] == ["Killed", "Killed"]


def test_a_healthy_gang_has_no_failure() -> None:
    assert first_failure(seen(pod(0), ready(pod(1)), ended(pod(2))), 1, NOON, settle_user_errors=False) is None


def test_a_lost_peer_waits_for_its_cause_to_show_up() -> None:
    gang = seen(ended(pod(0), 69, after=0), ready(pod(1)))
    assert first_failure(gang, 1, at(0), settle_user_errors=False) is None
    assert first_failure(gang, 1, at(4.9), settle_user_errors=False) is None


def test_a_lost_peer_is_the_failure_when_nothing_else_shows_up() -> None:
    gang = seen(ended(pod(0), 69, after=0), ready(pod(1)))
    found = first_failure(gang, 1, NOON + SETTLE, settle_user_errors=False)
    assert found.reason == "PeerLost"


def test_nothing_is_awaited_when_all_workers_have_ended() -> None:
    found = first_failure(seen(ended(pod(0), 69), ended(pod(1))), 1, NOON, settle_user_errors=False)
    assert found.host == 0


@pytest.mark.parametrize("code", [1, 3, 71, 137, 139])
def test_any_other_failure_of_the_trainer_is_reported_at_once(code: int) -> None:
    assert first_failure(seen(ended(pod(0), code), ready(pod(1))), 1, NOON, settle_user_errors=False) is not None


@pytest.mark.parametrize("code", [1, 3, 71, 139])
def test_the_exit_code_of_a_users_own_loop_may_be_the_consequence_of_a_lost_peer(code: int) -> None:
    gang = seen(ended(pod(0), code, after=0), ready(pod(1)))
    assert first_failure(gang, 1, at(4.9), settle_user_errors=True) is None
    found = first_failure(gang, 1, at(5), settle_user_errors=True)
    assert found.exit_code == code


@pytest.mark.parametrize(
    "sure",
    [
        ended(pod(1), 137),
        ended(pod(1), 137, reason="OOMKilled"),
        deleted(ready(pod(1))),
        deleted(disrupted(ready(pod(1)), "DeletionByTaintManager")),
        with_status(pod(1), phase="Failed", reason="UnexpectedAdmissionError", startTime=time_at(0)),
    ],
)
def test_a_sure_sign_in_a_users_own_loop_is_reported_at_once(sure: dict[str, Any]) -> None:
    found = first_failure(seen(ready(pod(0)), sure), 1, NOON, settle_user_errors=True)
    assert found.host == 1


@pytest.mark.parametrize(
    ("sure_after", "culprit"),
    [
        pytest.param(2, 1, id="before"),
        pytest.param(13, 1, id="a moment after, as Kubernetes tells of it late"),
        pytest.param(16, 0, id="long after, when somebody cleared up"),
    ],
)
def test_a_sure_sign_takes_precedence_over_the_exit_code_of_a_users_own_loop(sure_after: int, culprit: int) -> None:
    gang = (ended(pod(0), 1, after=10), ended(pod(1), 137, after=sure_after, reason="OOMKilled"))
    assert failure_of(*gang, own_loop=True).host == culprit


def test_the_trainers_exit_code_needs_no_other_sign() -> None:
    gang = (ended(pod(0), 1, after=10), ended(pod(1), 137, after=13, reason="OOMKilled"))
    assert failure_of(*gang).host == 0


def test_a_lost_peer_is_not_the_cause_in_a_users_own_loop_either() -> None:
    assert failure_of(ended(pod(0), 69, after=1), ended(pod(1), 1, after=9), own_loop=True).host == 1


def test_one_worker_that_cannot_start_is_enough() -> None:
    waits = {"name": "trainer", "state": {"waiting": {"reason": "InvalidImageName", "message": "no name"}}}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": time_at(0)}
    stuck = with_status(pod(1, node="tpu-node-1"), containerStatuses=[waits], conditions=[scheduled])
    found = first_failure(seen(pod(0), stuck), 1, NOON, settle_user_errors=False)
    assert (found.host, found.reason) == (1, "InvalidImageName")


@pytest.mark.parametrize("case", [*STUCK, *START_ERRORS], ids=lambda case: case.name)
@pytest.mark.parametrize("peer", [running(), with_status(exited(0), phase="Succeeded")], ids=["runs", "has run"])
def test_a_worker_that_does_not_start_is_its_nodes_failure_if_another_started(
    case: FailedPod, peer: dict[str, Any]
) -> None:
    found = first_failure(seen(case.body, of_host(1, peer)), 1, at(300), settle_user_errors=False)
    assert (found.failure_class, found.reason) == ("Infrastructure", case.reason)
    was_so_anyhow = case.failure_class == "Infrastructure"
    what = "" if was_so_anyhow else "other workers started with the same image and spec, but this one did not: "
    assert found.message == what + case.message


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param(held_up("ContainerCreating", ""), id="being created"),
        pytest.param(
            placed(
                phase="Running",
                containerStatuses=[
                    container({"running": {"startedAt": time_at(2)}}, "helper"),
                    container({"waiting": {"reason": "ContainerCreating"}}),
                ],
            ),
            id="beside a helper that runs",
        ),
    ],
)
@pytest.mark.parametrize("case", STUCK, ids=lambda case: case.name)
def test_a_peer_that_has_not_started_excuses_nobody(case: FailedPod, peer: dict[str, Any]) -> None:
    gang = seen(case.body, of_host(1, peer))
    found = first_failure(gang, 1, at(case.at), settle_user_errors=False)
    assert (found.failure_class, found.reason) == (case.failure_class, case.reason)


@pytest.mark.parametrize("case", START_ERRORS, ids=lambda case: case.name)
def test_workers_that_could_not_be_started_do_not_excuse_each_other(case: FailedPod) -> None:
    found = failure_of(case.body, of_host(1, case.body))
    assert (found.failure_class, found.reason) == (case.failure_class, case.reason)


def test_a_worker_that_has_started_does_not_excuse_itself() -> None:
    waits = container({"waiting": {"reason": "InvalidImageName", "message": "no name"}}, "mount")
    found = failure_of(with_status(running(), initContainerStatuses=[waits]))
    assert found.failure_class == "UserError"


def test_a_node_that_alone_cannot_pull_the_image_gets_time() -> None:
    denied = held_up("ImagePullBackOff", backs_off(DENIED))
    gang = seen(denied, *(of_host(host, running()) for host in (1, 2, 3)))
    assert first_failure(gang, 1, at(299), settle_user_errors=False) is None
    assert next_look(gang, at(120)) == at(300) - at(120)


def test_a_settling_gang_is_checked_again_when_it_has_settled() -> None:
    gang = seen(ended(pod(0), 69, after=0), ready(pod(1)))
    assert next_look(gang, at(2)) == at(5) - at(2)
    assert next_look(gang, at(5)) is None


@pytest.mark.parametrize("own_loop", [False, True])
def test_nothing_waits_for_an_end_by_a_clock_that_is_ahead(own_loop: bool) -> None:
    gang = seen(ended(pod(0), 69, after=1200), ready(pod(1)))
    found = first_failure(gang, 1, NOON, settle_user_errors=own_loop)
    assert (found.reason, found.time) == ("PeerLost", time_at(0))
    assert next_look(gang, NOON) is None


@given(
    ends=st.lists(st.tuples(st.sampled_from([1, 3, 69, 137, 139]), st.integers(0, 20)), max_size=4),
    running=st.integers(0, 2),
    now=st.integers(0, 20),
    own_loop=st.booleans(),
)
def test_a_failure_began_when_it_was_announced(
    ends: list[tuple[int, int]], running: int, now: int, own_loop: bool
) -> None:
    failed = [ended(pod(host), code, after=after) for host, (code, after) in enumerate(ends)]
    gang = seen(*failed, *(ready(pod(9 + host)) for host in range(running)))
    moment = at(now)
    for _ in gang:
        if first_failure(gang, 1, moment, settle_user_errors=own_loop) is None and failed:
            wait = next_look(gang, moment)
            assert wait is not None
            moment += wait
    assert (first_failure(gang, 1, moment, settle_user_errors=own_loop) is not None) == bool(failed)
    assert moment - at(now) <= SETTLE


def test_a_missing_pod_counts_as_deleted() -> None:
    found = missing_worker(WorkerId(1, 0, 3), "digits", None, NOON)
    assert (found.failure_class, found.reason, found.host) == (FailureClass.INFRASTRUCTURE, "PodDeleted", 3)


def test_a_hang_is_charged_to_the_reporting_worker() -> None:
    why = "no step for 900 s"
    found = hang_failure(*seen(ready(pod(0, node="tpu-node-1"))), why, 4, at(7))
    assert (found.failure_class, found.reason, found.message) == (
        "Hang",
        "NoProgress",
        why,
    )
    assert (found.attempt, found.host, found.node, found.time) == (4, 0, "tpu-node-1", time_at(7))


def test_a_hang_keeps_the_end_of_its_stacks_below_what_happened() -> None:
    found = hang_failure(*seen(ready(pod(0))), "no step; the stacks:\n" + "x" * 4000 + "all_reduce", 1, NOON)
    assert found.message.startswith("no step; the stacks:\nxxx")
    assert found.message.endswith("all_reduce")
    assert len(found.message) == 1000


def test_a_failure_is_never_in_the_future() -> None:
    found = first_failure(seen(ended(pod(), 1, after=100)), 1, NOON, settle_user_errors=False)
    assert found.time == time_at(0)
