"""Failures of workers on real nodes: each is on record, and costs one restart or none.

Each test reads what became of one job, whose workers run a loop without torch: the stories are the operator's alone.
What a training keeps of a restart is shown in `test_worker_nodes`, a deleted worker in `test_names`.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.object_storage import ObjectStorage
from tests.cluster.processes import wait_until
from tests.e2e import containers
from tests.e2e.chronicle import Chronicle, Recoveries, recovery
from tests.e2e.own_loop import HOARDING, RAISING
from tests.e2e.pods import ended_with
from tests.e2e.together import Story
from tests.e2e.training import HOSTS, NAME, OWN_LOOP, Training, started
from tests.stories import Stories
from tpu_contract.protocol import StartPhase

STEP_SECONDS = 0.1
NO_PROGRESS_SECONDS = 30
# A waiting limit, not an expectation.
GONE_SECONDS = 60.0

# The parts into which a job's seconds are divided; the remaining field is a part of the productive seconds.
ACCOUNTS = ("queue", "start", "productive", "wasted", "recovery", "moving", "suspended")


def waits_as(reason: str) -> Callable[[Object], bool]:
    def has_struck(pod: Object) -> bool:
        states = [status["state"] for status in pod["status"].get("containerStatuses", [])]
        return any(state.get("waiting", {}).get("reason") == reason for state in states)

    return has_struck


def to_running(act: Callable[[Training], object]) -> Callable[[Training], None]:
    def inflict(training: Training) -> None:
        training.wait_attempt()
        act(training)

    return inflict


def stop_once_it_reports_steps(training: Training) -> None:
    training.wait_steps_reported()
    containers.stop(training.pod(0))


@dataclass(frozen=True)
class Fault:
    """What happens to a worker, and what must be on record about it.

    host: the host it happens to, or None for any. said: a pattern for the message. code: the exit code on record.
    has_struck: whether a pod shows it, according to the kubelet or the API server; None where they cannot know and
    `inflict` itself makes sure. inflict: does it to a training; nothing where the worker does it to itself.
    env, spec: what the job needs for it.
    """

    host: int | None
    failure_class: str
    reason: str
    said: str
    has_struck: Callable[[Object], bool] | None = None
    inflict: Callable[[Training], object] = lambda training: None
    code: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)


HEALED = {
    "killed": Fault(
        host=1,
        failure_class="Infrastructure",
        reason="Killed",
        said="exit code 137",
        code=137,
        spec=OWN_LOOP,
        inflict=to_running(lambda training: containers.kill(training.pod(1))),
        has_struck=ended_with(137),
    ),
    "out of memory": Fault(
        host=1,
        failure_class="OutOfMemory",
        reason="OOMKilled",
        said="more memory than its limit",
        code=137,
        env={HOARDING: "1"},
        spec=OWN_LOOP | {"trainer": OWN_LOOP["trainer"] | {"resources": {"limits": {"memory": "128Mi"}}}},
        has_struck=ended_with(137, "OOMKilled"),
    ),
    # Only the operator notices; no kubelet does.
    "silent": Fault(
        host=0,
        failure_class="Hang",
        reason="NoProgress",
        said=f"no step was reported for {NO_PROGRESS_SECONDS} s",
        spec=OWN_LOOP | {"runPolicy": {"progressDeadlineSeconds": NO_PROGRESS_SECONDS}},
        inflict=to_running(stop_once_it_reports_steps),
    ),
}
# The operator does not retry what would fail again.
FATAL = {
    "wrong": Fault(
        host=1,
        failure_class="UserError",
        reason="UserError",
        said=r"(?s)own_loop\.py.*in run_out_of_ink.*ValueError: the pen has no ink",
        code=1,
        env={RAISING: "1"},
        spec=OWN_LOOP,
        has_struck=ended_with(1),
    ),
    "without image": Fault(
        host=None,
        failure_class="UserError",
        reason="ErrImageNeverPull",
        said=r'Container image "[^"]*:none" is not present with pull policy of Never',
        spec={"trainer": {"image": "localhost/tpu-examples:none", "imagePullPolicy": "Never"}},
        has_struck=waits_as("ErrImageNeverPull"),
    ),
}
FAULTS = HEALED | FATAL


@dataclass(frozen=True)
class Outcome:
    """What became of a training. left: pods and config maps at the end."""

    status: Object
    chronicle: Chronicle
    left: list[str]

    @classmethod
    def of(cls, training: Training, kept: list[str]) -> "Outcome":
        """`kept`: what stays of the first attempt if the job succeeds."""
        status = training.wait_ended()

        def left() -> list[str]:
            return [name for kind in ("pods", "configmaps") for name in training.names(kind) if name.startswith(NAME)]

        if status["state"] == "Succeeded":
            # The next attempt did not wait for a pod whose node had missed its heartbeats for a moment.
            with suppress(TimeoutError):
                wait_until(lambda: of_first(left()) == kept, timeout=GONE_SECONDS, what="the first attempt has gone")
        return cls(status, training.chronicle, left())

    def node_of(self, pod: str) -> str | None:
        told = [moment.item["spec"].get("nodeName") for moment in self.chronicle.moments() if moment.name == pod]
        return next((node for node in told if node), None)


def of_first(names: list[str]) -> list[str]:
    """Those of the first attempt."""
    return [name for name in names if name.startswith(f"{NAME}-1")]


def kept(fault: Fault) -> list[str]:
    """The pod that ended by itself stays for its log."""
    return [] if fault.code is None else [f"{NAME}-1-0-{fault.host}"]


def hurt(fault: Fault, cluster: Cluster, storage: ObjectStorage) -> Outcome:
    with started(cluster, storage, STEP_SECONDS, fault.env, **fault.spec) as training:
        fault.inflict(training)
        return Outcome.of(training, kept(fault))


STORIES = {name: Story(partial(hurt, fault)) for name, fault in FAULTS.items()}


@pytest.mark.parametrize("name", [name for name in HEALED if HEALED[name].has_struck])
def test_the_fault_struck_one_worker_before_anything_was_done_about_it(stories: Stories, name: str) -> None:
    has_struck = FAULTS[name].has_struck
    told = stories.end_of(name).chronicle.moments()
    decided = next(m.version for m in told if not m.is_pod and m.item.get("status", {}).get("attempt") == 2)
    struck = {m.name for m in told if m.is_pod and m.version < decided and has_struck(m.item)}
    assert struck == {f"{NAME}-1-0-{FAULTS[name].host}"}


@pytest.mark.parametrize("name", FATAL)
def test_the_fault_struck(stories: Stories, name: str) -> None:
    has_struck = FAULTS[name].has_struck
    told = stories.end_of(name).chronicle.moments()
    assert any(m.is_pod and has_struck(m.item) for m in told)


@pytest.mark.parametrize("name", FAULTS)
def test_the_failure_is_on_record(stories: Stories, name: str) -> None:
    fault, story = FAULTS[name], stories.end_of(name)
    failure = story.status["firstFailure"]
    host = failure["host"] if fault.host is None else fault.host
    pod = f"{NAME}-1-0-{host}"
    expected = {
        "attempt": 1,
        "pod": pod,
        "node": story.node_of(pod),
        "slice": 0,
        "host": host,
        "exitCode": fault.code,
        "class": fault.failure_class,
        "reason": fault.reason,
    }
    assert {key: failure.get(key) for key in expected} == expected
    assert re.search(fault.said, failure["message"])
    assert story.status["lastFailure"] == failure


@pytest.mark.parametrize("name", HEALED)
def test_the_gang_is_restarted_once(stories: Stories, name: str, recoveries: Recoveries) -> None:
    story = stories.end_of(name)
    recoveries[f"worker {name}"] = recovery(story.chronicle, 2)
    assert story.chronicle.attempts() == [1, 2]
    assert story.chronicle.created() == [f"{NAME}-{attempt}-0-{host}" for attempt in (1, 2) for host in range(HOSTS)]
    assert story.status["restarts"]["byClass"] == [{"class": FAULTS[name].failure_class, "count": 1}]


@pytest.mark.parametrize("name", HEALED)
def test_the_restart_is_told_phase_by_phase(stories: Stories, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A loop of the users' own reports its steps only."""
    first, again = stories.end_of(name).status["starts"]
    with capsys.disabled():
        print(f"\nstart after worker {name}: {again}")
    steps = {"noticed", "queued", "backoff", "cleared", "bound", "started", StartPhase.UNTOLD}
    assert again["seconds"].keys() == steps
    assert (first["attempt"], again["attempt"]) == (1, 2)
    assert again["cause"] == HEALED[name].failure_class
    assert min(again["seconds"].values()) >= 0
    assert sum(again["seconds"].values()) == again["totalSeconds"]
    job = stories.end_of(name).chronicle.job()
    assert again["totalSeconds"] <= seconds(job["status"]["completionTime"]) - seconds(again["since"]) + 1


@pytest.mark.parametrize("name", HEALED)
def test_the_job_succeeds(stories: Stories, name: str) -> None:
    story = stories.end_of(name)
    assert story.status["state"] == "Succeeded", story.chronicle.summary()


@pytest.mark.parametrize("name", HEALED)
def test_of_the_first_attempt_only_the_log_of_the_failure_is_left(stories: Stories, name: str) -> None:
    assert of_first(stories.end_of(name).left) == kept(FAULTS[name])


@pytest.mark.parametrize("name", FATAL)
def test_a_failure_that_would_repeat_is_not_retried(stories: Stories, name: str) -> None:
    story = stories.end_of(name)
    assert (story.status["state"], story.chronicle.attempts()) == ("Failed", [1])
    assert not story.status.get("restarts", {}).get("byClass")
    assert story.chronicle.created() == [f"{NAME}-1-0-{host}" for host in range(HOSTS)]


@pytest.mark.parametrize("name", FAULTS)
def test_the_seconds_of_the_jobs_life_add_up(stories: Stories, name: str) -> None:
    told = stories.end_of(name).chronicle
    job, goodput = told.job(), told.status()["goodput"]
    life = seconds(job["status"]["completionTime"]) - seconds(job["metadata"]["creationTimestamp"])
    assert goodput["activity"] == "Finished"
    assert sum(goodput[f"{account}Seconds"] for account in ACCOUNTS) == life


def seconds(time: str) -> int:
    return int(datetime.fromisoformat(time).timestamp())
