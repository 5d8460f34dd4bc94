"""The class of every failure: each row of the table, what must not match it, and arbitrary statuses."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ended_pods import BUSY, ENDED
from tests.unit.kubelet_statuses import FailedPod, Object, container, exited, held_up, of_entrypoint, refused, running
from tests.unit.pods import at, deleted, disrupted, pod, ready, seen, time_at, with_status
from tests.unit.stuck_pods import NO_CHIP, STUCK
from tpu_contract.protocol import ExitCode
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.cluster_state import observed
from tpu_training_operator.domain.failures import table
from tpu_training_operator.domain.failures.first import first_failure, is_device_fault, next_look
from tpu_training_operator.domain.failures.table import TABLE, classify
from tpu_training_operator.domain.job.trainer_report import LastWords
from tpu_training_operator.domain.plan.restarts import waiting

FAILED_PODS = (*ENDED, *STUCK)
A_DAY = 24 * 3600
SECOND = timedelta(seconds=1)


def failure_of(body: Object, after: float = A_DAY) -> Failure | None:
    return first_failure(seen(body), 1, at(after), settle_user_errors=False)


def succeeded(message: str = "") -> Object:
    """A loop of the user's own, nine seconds past noon."""
    return with_status(exited(0, message), phase="Succeeded")


def of_unknown_end(body: Object) -> Object:
    return with_status(body, containerStatuses=[])


def told(body: Object, after: float = A_DAY) -> tuple[str, str, str]:
    found = failure_of(body, after)
    return found.failure_class, found.reason, found.message


@pytest.mark.parametrize("case", FAILED_PODS, ids=lambda case: case.name)
def test_the_table_of_failure_classes(case: FailedPod) -> None:
    assert told(case.body, case.at) == (case.failure_class, case.reason, case.message)


def test_every_exit_code_of_the_trainer_but_success_has_a_class() -> None:
    assert {*ExitCode} - table.EXIT_CODE_CLASSES.keys() == {ExitCode.Succeeded}


def test_every_row_of_the_table_has_an_example_pod() -> None:
    found = [classify(*seen(case.body)) for case in FAILED_PODS]
    assert [row for row in TABLE if row not in found] == []


@pytest.mark.parametrize("case", [case for case in STUCK if case.at > 0], ids=lambda case: case.name)
def test_a_pod_that_does_not_start_gets_time_and_is_checked_when_it_is_over(case: FailedPod) -> None:
    just_before = at(case.at) - SECOND
    assert failure_of(case.body, case.at - 1) is None
    assert next_look(seen(case.body), just_before) == SECOND


@pytest.mark.parametrize("case", STUCK, ids=lambda case: case.name)
def test_a_pod_that_never_starts_counts_as_failed_when_its_time_is_over(case: FailedPod) -> None:
    found = failure_of(case.body)
    assert found.time == time_at(case.at)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(pod(), id="without a node"),
        pytest.param(held_up("ContainerCreating", ""), id="being created"),
        pytest.param(held_up("PodInitializing", ""), id="behind init containers"),
        pytest.param(ready(running()), id="ready"),
        pytest.param(with_status(exited(0), phase="Succeeded"), id="succeeded"),
        pytest.param(deleted(succeeded(), after=15), id="succeeded and deleted"),
        pytest.param(disrupted(succeeded(), "EvictionByEvictionAPI", after=15), id="succeeded and disrupted"),
        pytest.param(of_entrypoint(deleted(succeeded("{}"))), id="deleted, and the trainer was done before it stopped"),
        pytest.param(
            of_entrypoint(with_status(exited(0, '{"outcome": "Succ'), phase="Succeeded")), id="its last words cut short"
        ),
        pytest.param(
            deleted(with_status(exited(0), phase="Running"), after=15), id="succeeded beside a sidecar and deleted"
        ),
        pytest.param(disrupted(running(), "EvictionByEvictionAPI"), id="marked and not yet deleted"),
        pytest.param(
            with_status(
                running(),
                containerStatuses=[
                    container({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, "helper"),
                    container({"running": {"startedAt": time_at(2)}}),
                ],
            ),
            id="running, beside a helper that does not start",
        ),
        pytest.param(
            with_status(
                held_up("ContainerCreating", ""),
                initContainerStatuses=[container({"running": {"startedAt": time_at(1)}}, "mount")],
            ),
            id="being created, behind a sidecar that runs",
        ),
    ],
)
def test_a_healthy_or_waiting_pod_has_not_failed(body: Object) -> None:
    assert failure_of(body) is None
    assert next_look(seen(body), at(A_DAY)) is None


@pytest.mark.parametrize(
    ("body", "failure_class", "reason"),
    [
        (deleted(succeeded()), "Infrastructure", "PodDeleted"),
        (deleted(succeeded(), after=9), "Infrastructure", "PodDeleted"),
        # The node's clock is behind.
        (deleted(succeeded(), after=14), "Infrastructure", "PodDeleted"),
        (deleted(of_unknown_end(succeeded())), "Infrastructure", "PodDeleted"),
        (deleted(with_status(succeeded(), phase="Running")), "Infrastructure", "PodDeleted"),
        (disrupted(succeeded(), "EvictionByEvictionAPI"), "Preemption", "EvictionByEvictionAPI"),
        (deleted(disrupted(succeeded(), "EvictionByEvictionAPI")), "Preemption", "EvictionByEvictionAPI"),
    ],
)
def test_a_users_own_loop_that_was_stopped_has_not_succeeded(body: Object, failure_class: str, reason: str) -> None:
    assert told(body)[:2] == (failure_class, reason)


@pytest.mark.parametrize(
    "message",
    [
        "OSError: [Errno 98] Address already in use",
        "OSError: [Errno 16] Device or resource busy: '/mnt/data/.nfs0001'",
        "PermissionError: /dev/vfio/0\nOSError: Device or resource busy",
        "PermissionError: [Errno 13] Permission denied: '/mnt/data/vfio'",
        "OSError: [Errno 28] No space left on device: '/tmp/torch_1'",
        "RuntimeError: worker (pid 7) exited unexpectedly",
        # libtpu's lock file lies in the container's own /tmp: the other process is one of the user's.
        "ABORTED: The TPU is already in use by process with pid 7. Not attempting to load libtpu.so in this process.",
    ],
)
def test_an_error_that_only_resembles_a_device_fault_stays_a_user_error(message: str) -> None:
    assert told(exited(1, message))[1] == "UserError"


@pytest.mark.parametrize(
    ("reason", "counts"),
    [
        *((reason, True) for reason in ("DeviceBusy", "DeviceFailed", "DevicesUnhealthy", "HostUnfit")),
        *((reason, False) for reason in ("OutOfcpu", "Killed", "SliceUnfit")),
    ],
)
def test_faults_of_chips_count_against_their_node(reason: str, counts: bool) -> None:
    (case, *_) = (case for case in ENDED if case.reason == reason)
    found = failure_of(case.body)
    assert found is not None
    assert is_device_fault(found) is counts


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (disrupted(exited(137, reason="OOMKilled"), "PreemptionByScheduler", after=5), "PreemptionByScheduler"),
        (deleted(exited(137, reason="OOMKilled"), after=5), "OOMKilled"),
        (exited(137, BUSY, reason="OOMKilled"), "OOMKilled"),
        (deleted(exited(1, BUSY), after=5), "PodDeleted"),
        (deleted(exited(1, BUSY), after=10), "DeviceBusy"),
        (deleted(refused("OutOfcpu", "no room"), after=5), "OutOfcpu"),
        (exited(128, NO_CHIP, reason="StartError"), "DeviceFailed"),
        (exited(70, BUSY), "DeviceBusy"),
    ],
)
def test_the_surest_of_several_signs_counts(body: Object, reason: str) -> None:
    assert told(body)[1] == reason


def test_a_gang_that_kueue_stops_is_preempted() -> None:
    stopped = deleted(disrupted(exited(137), "Preempted", kind="TerminationTarget"))
    assert told(stopped)[:2] == ("Preemption", "Preempted")


def test_a_disruption_after_its_end_does_not_excuse_a_worker() -> None:
    evicted_later = deleted(disrupted(exited(1, "KeyError"), "EvictionByEvictionAPI", after=60), after=60)
    assert told(evicted_later)[1] == "UserError"


def test_a_disruption_is_the_cause_even_if_a_clock_is_behind() -> None:
    assert told(disrupted(exited(1), "EvictionByEvictionAPI", after=12))[1] == "EvictionByEvictionAPI"


def test_a_cancelled_disruption_excuses_nobody() -> None:
    body = disrupted(exited(1), "EvictionByEvictionAPI", after=5)
    body["status"]["conditions"][-1]["status"] = "False"
    assert told(body)[1] == "UserError"


def test_a_refused_pod_failed_when_the_kubelet_saw_it() -> None:
    found = failure_of(refused("OutOfcpu", "no room"))
    assert found.time == time_at(0)


def test_a_runtime_that_does_not_know_when_a_container_ended_says_1970() -> None:
    body = exited(1)
    body["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = "1970-01-01T00:00:00Z"
    found = failure_of(body)
    assert found.time == time_at(9)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ('{"message": "KeyError"}', "KeyError"),
        ("Traceback ...\nKeyError\n", "Traceback ...\nKeyError"),
        ('{"outcome": "Preempted"}', ""),
        ("42", "42"),
        ("[" * 4000, "[" * 4000),
        ('{"message": "half a character: \\ud83d"}', "half a character: ?"),
        ("", ""),
    ],
)
def test_the_last_words_come_from_the_termination_message(message: str, words: str) -> None:
    [pod] = seen(exited(1, message))
    assert pod.last_words == words


@pytest.mark.parametrize("code", [1, 137, 139])
def test_a_message_is_cut_to_fit_the_status_and_keeps_its_end(code: int) -> None:
    said = told(exited(code, "x" * 4000 + "ValueError: shapes"))[2]
    assert len(said) == 1000
    assert said.endswith("ValueError: shapes")


def test_last_words_never_displace_what_happened() -> None:
    said = told(exited(137, "x" * 4000))[2]
    assert said.partition(": ")[2].startswith("xxx")
    assert "(exit code 137)" in said


# A tenant's texts, of any length, are searched for every pod of a gang.
PATTERNS = {
    name: found for module in (table, waiting) for name, found in vars(module).items() if isinstance(found, re.Pattern)
}


def repeats(parsed: Any) -> Iterator[tuple[int, int]]:
    """The largest count of every repeat in a parsed pattern, and how many repeats it stands in."""
    for node in parsed if isinstance(parsed, (list, tuple, import_module("re._parser").SubPattern)) else ():
        if isinstance(node, tuple) and "REPEAT" in str(node[0]):
            yield node[1][1], 0
            yield from ((most, depth + 1) for most, depth in repeats(node[1][2]))
        else:
            yield from repeats(node)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_repeat_in_a_pattern_is_bounded_and_not_nested(name: str) -> None:
    found = list(repeats(import_module("re._parser").parse(PATTERNS[name].pattern)))
    assert [(most, depth) for most, depth in found if most > 300 or depth > 0] == []


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("x" * 100_000 + " exceeds the limit", "StorageLimitExceeded"),
        ("exceeds the limit " + "x" * 100_000, "StorageLimitExceeded"),
        ("x" * 50_000 + " exceeds the limit " + "x" * 50_000, "Evicted"),
    ],
    ids=["end", "beginning", "middle"],
)
def test_a_long_text_is_searched_at_its_ends(message: str, reason: str) -> None:
    assert told(refused("Evicted", message))[1] == reason


def test_a_termination_message_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(observed, "read_last_words", lambda text: parsed.append(text) or LastWords(message="KeyError"))
    assert told(exited(1, "{}"))[1:] == ("UserError", "KeyError")
    assert parsed == ["{}"]


# What the API server would store: any field absent, any text, times that are times.
TIMES = st.integers(-A_DAY, A_DAY).map(time_at)
WORDS = st.text(max_size=40) | st.sampled_from(
    sorted({case.message for case in FAILED_PODS} | {json.dumps({"message": 3}), "[" * 3000, '{"message": "\\ud83d"}'})
)
REASONS = st.text(max_size=20) | st.sampled_from(
    sorted(
        {case.reason for case in FAILED_PODS} | {"Evicted", "ErrImagePull", "ImagePullBackOff", "CreateContainerError"}
    )
)
TERMINATED = st.fixed_dictionaries(
    {"exitCode": st.integers(-1, 300)},
    optional={"reason": REASONS, "message": WORDS, "finishedAt": TIMES | st.none(), "startedAt": TIMES | st.none()},
)
STATE = st.fixed_dictionaries(
    {},
    optional={
        "waiting": st.fixed_dictionaries({}, optional={"reason": REASONS, "message": WORDS}),
        "running": st.fixed_dictionaries({}, optional={"startedAt": TIMES}),
        "terminated": TERMINATED,
    },
)
CONTAINERS = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["trainer", "mount"])}, optional={"state": STATE}), max_size=3
)
CONDITIONS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["DisruptionTarget", "Ready", "PodScheduled", "Initialized"]),
            "status": st.sampled_from(["True", "False", "Unknown"]),
        },
        optional={"reason": REASONS, "message": WORDS, "lastTransitionTime": TIMES | st.none()},
    ),
    max_size=4,
)
STATUSES = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        "reason": REASONS,
        "message": WORDS,
        "startTime": TIMES,
        "conditions": CONDITIONS,
        "containerStatuses": CONTAINERS,
        "initContainerStatuses": CONTAINERS,
    },
)
DELETIONS = st.just({}) | st.fixed_dictionaries(
    {"deletionTimestamp": TIMES}, optional={"deletionGracePeriodSeconds": st.integers(0, 3600)}
)


@st.composite
def any_pods(draw: st.DrawFn) -> Object:
    body = pod(node=draw(st.sampled_from(["", "tpu-node-7"])))
    marks = {"creationTimestamp": draw(TIMES), **draw(DELETIONS)}
    return {**body, "metadata": {**body["metadata"], **marks}, "status": draw(STATUSES)}


@settings(max_examples=500)
@given(body=any_pods(), after=st.integers(-A_DAY, 2 * A_DAY))
def test_every_failed_status_is_reported(body: Object, after: int) -> None:
    found = failure_of(body, after)
    assert found is not None or body["status"].get("phase") != "Failed"
    if found is not None:
        assert found.failure_class in FailureClass
        assert len(found.message) <= 1000
        json.dumps(found.as_json())


@given(body=any_pods(), after=st.integers(-A_DAY, 2 * A_DAY))
def test_the_next_look_covers_every_decision_that_only_time_brings(body: Object, after: int) -> None:
    later = failure_of(body, 3 * A_DAY)
    if failure_of(body, after) is None and later is not None:
        wait = next_look(seen(body), at(after))
        assert failure_of(body, after + wait.total_seconds()) is not None
