"""Which worker is to blame for a gang that went down, and for what."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pods import NOON, at, deleted, disrupted, ended, pod, ready, seen, time_at, with_status
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.failures import SETTLE, first_failure, last_words

LATER = NOON + 10 * SETTLE


def failure_of(*bodies: dict[str, Any]) -> Failure:
    found = first_failure(seen(*bodies), 1, LATER)
    assert found is not None
    return found


SAYS = json.dumps({"outcome": "UserError", "message": "KeyError: 'x'"})
REFUSED = with_status(pod(), phase="Failed", reason="UnexpectedAdmissionError", message="2 chips, not 4")
OUT_OF_MEMORY = "the worker used more memory than its limit"
GONE = "the pod was deleted while the gang was running"
DISRUPTED = "the pod was disrupted"


@pytest.mark.parametrize(
    ("body", "failure_class", "reason", "message"),
    [
        # The trainer's own exit codes, in its own words.
        (ended(pod(), 1, message=SAYS), "UserError", "UserError", "KeyError: 'x'"),
        (ended(pod(), 78, message="no run spec"), "UserError", "BadSpec", "no run spec"),
        (ended(pod(), 69), "Infrastructure", "PeerLost", "the worker exited with code 69"),
        (ended(pod(), 70), "Unknown", "InternalError", "the worker exited with code 70"),
        (ended(pod(), 71), "Hang", "Hung", "the worker exited with code 71"),
        (ended(pod(), 74), "Infrastructure", "StorageFailed", "the worker exited with code 74"),
        (ended(pod(), 76), "Unknown", "Diverged", "the worker exited with code 76"),
        (ended(pod(), 75), "Preemption", "Preempted", "the worker exited with code 75"),
        # Any other code, of a loop of the user's own.
        (ended(pod(), 3, message="bad luck"), "Unknown", "ExitCode", "bad luck"),
        (ended(pod(), 139), "Unknown", "ExitCode", "the worker exited with code 139"),
        # Ended from outside.
        (ended(pod(), 137), "Infrastructure", "Killed", "the worker was killed (exit code 137)"),
        (ended(pod(), 143), "Infrastructure", "Killed", "the worker was killed (exit code 143)"),
        (ended(pod(), 137, reason="OOMKilled"), "OutOfMemory", "OOMKilled", OUT_OF_MEMORY),
        (deleted(ready(pod())), "Infrastructure", "PodDeleted", GONE),
        # The kubelet's and the control plane's signs.
        (REFUSED, "Infrastructure", "UnexpectedAdmissionError", "2 chips, not 4"),
        (with_status(pod(), phase="Failed"), "Infrastructure", "PodFailed", "the pod failed"),
        (
            disrupted(ended(pod(), 1), "PreemptionByScheduler", message="by b"),
            "Preemption",
            "PreemptionByScheduler",
            "by b",
        ),
        (disrupted(ended(pod(), 1), "TerminationByKubelet"), "Preemption", "TerminationByKubelet", DISRUPTED),
        (deleted(disrupted(pod(), "EvictionByEvictionAPI")), "Preemption", "EvictionByEvictionAPI", DISRUPTED),
        (deleted(disrupted(pod(), "DeletionByTaintManager")), "Infrastructure", "DeletionByTaintManager", DISRUPTED),
    ],
)
def test_the_table_of_failure_classes(body: dict[str, Any], failure_class: str, reason: str, message: str) -> None:
    found = failure_of(body)
    assert (found.failure_class, found.reason, found.message) == (failure_class, reason, message)


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
        pytest.param([ended(pod(0), 0, after=1), ended(pod(1), 3, after=9)], 1, id="success is no failure"),
        pytest.param([deleted(ended(pod(0), 0)), ended(pod(1), 3, after=9)], 1, id="nor is its deletion"),
    ],
)
def test_the_worker_that_failed_first_is_the_cause(bodies: list[dict[str, Any]], culprit: int) -> None:
    assert failure_of(*bodies).host == culprit


def test_a_gang_in_which_all_is_well_has_no_failure() -> None:
    assert first_failure(seen(pod(0), ready(pod(1)), ended(pod(2))), 1, NOON) is None


def test_a_lost_peer_waits_for_its_cause_to_show_up() -> None:
    gang = seen(ended(pod(0), 69, after=0), ready(pod(1)))
    assert first_failure(gang, 1, at(0)) is None
    assert first_failure(gang, 1, at(4.9)) is None


def test_a_lost_peer_is_the_failure_when_nothing_else_shows_up() -> None:
    gang = seen(ended(pod(0), 69, after=0), ready(pod(1)))
    found = first_failure(gang, 1, NOON + SETTLE)
    assert found is not None
    assert found.reason == "PeerLost"


def test_nobody_is_waited_for_when_all_have_ended() -> None:
    found = first_failure(seen(ended(pod(0), 69), ended(pod(1))), 1, NOON)
    assert found is not None
    assert found.host == 0


def test_any_other_failure_is_told_at_once() -> None:
    assert first_failure(seen(ended(pod(0), 1), ready(pod(1))), 1, NOON) is not None


def test_a_failure_lies_never_in_the_future() -> None:
    found = first_failure(seen(ended(pod(), 1, after=100)), 1, NOON)
    assert found is not None
    assert found.time == time_at(0)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ('{"message": "KeyError"}', "KeyError"),
        ("Traceback ...\nKeyError\n", "Traceback ...\nKeyError"),
        ('{"outcome": "Preempted"}', ""),
        ("42", "42"),
        ("[" * 4000, "[" * 4000),
        ("", ""),
    ],
)
def test_the_last_words_are_those_of_the_termination_message(message: str, words: str) -> None:
    assert last_words(seen(ended(pod(), 1, message=message))[0]) == words


@given(message=st.text() | st.recursive(st.none() | st.text(), st.lists).map(json.dumps))
def test_no_termination_message_keeps_a_failure_from_being_told(message: str) -> None:
    assert failure_of(ended(pod(), 1, message=message)).failure_class == "UserError"


def test_a_message_is_cut_to_what_a_status_can_hold() -> None:
    said = failure_of(ended(pod(), 1, message="x" * 4000 + "ValueError: shapes")).message
    assert len(said) == 1000
    assert said.endswith("ValueError: shapes")
