"""The operator dies after each of its effects in turn and another takes over: every story ends the same."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from tests.planner import kubelet, kueue
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import KEY, Crash, Operator
from tests.planner.scheduler import place_all
from tests.planner.story import all_finish, present, reason
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.objects.actions import AT_ONCE
from tpu_training_operator.kube.cluster import Object

ENOUGH_PASSES = 60
NODES = ["node-0", "node-1"]


@dataclass(frozen=True)
class Story:
    """`trouble` strikes between the passes until attempt `lasts` runs, which finishes. `end`: the final reason of
    Ready, "" for a deleted job."""

    trouble: Callable[[ModelCluster, Operator], None]
    lasts: int
    end: str
    policy: dict[str, Any] = field(default_factory=dict)
    spare_nodes: int = 4
    is_queued: bool = False
    job: dict[str, Any] = field(default_factory=dict)


def attempt_runs(cluster: ModelCluster, attempt: int) -> bool:
    status = cluster.status
    return status.attempt == attempt and is_true(status.conditions, ConditionType.GANG_READY)


def on_node_1(cluster: ModelCluster) -> Object:
    return next(pod for pod in present(cluster) if pod["spec"].get("nodeName") == "node-1")


def nothing(_: ModelCluster, __: Operator) -> None:
    pass


def a_worker_is_killed(cluster: ModelCluster, _: Operator) -> None:
    if attempt_runs(cluster, 1):
        kubelet.end(cluster, cluster.pods["digits-1-0-1"], 137)


def it_is_suspended_and_resumed(cluster: ModelCluster, _: Operator) -> None:
    suspended = cluster.job["spec"].get("runPolicy", {}).get("suspend")
    if suspended is None and attempt_runs(cluster, 1):
        cluster.edit_run_policy(suspend=True)
    elif suspended and cluster.status.state is State.SUSPENDED and not cluster.pods:
        cluster.edit_run_policy(suspend=False)


def a_node_is_lost_and_known_to_be(cluster: ModelCluster, _: Operator) -> None:
    if attempt_runs(cluster, 1):
        pod = on_node_1(cluster)
        kubelet.lose_node(cluster, pod)
        kubelet.give_up(cluster, pod)


def a_node_falls_silent(cluster: ModelCluster, _: Operator) -> None:
    if attempt_runs(cluster, 1):
        pod = on_node_1(cluster)
        kubelet.lose_node(cluster, pod)
        for name, peer in cluster.pods.items():
            if name != pod["metadata"]["name"]:
                kubelet.end(cluster, peer, 69)


def the_first_attempt_hangs(cluster: ModelCluster, operator: Operator) -> None:
    """It reports its step once, and later its stacks when asked."""
    inboxes = operator.inboxes
    assert inboxes is not None
    if attempt_runs(cluster, 1) and (inboxes.of(KEY).report is None or inboxes.wants_stacks(KEY)):
        stacks = "Thread 1: in all_reduce" if inboxes.wants_stacks(KEY) else None
        kubelet.report(cluster, 10, to=inboxes, stacks=stacks)


def a_node_has_broken_chips(cluster: ModelCluster, _: Operator) -> None:
    """The chips fail twice, so the third attempt avoids the node, and there is no other."""
    if attempt_runs(cluster, 1) or attempt_runs(cluster, 2):
        kubelet.find_chips_busy(cluster, on_node_1(cluster))


def it_is_evicted_once(cluster: ModelCluster, _: Operator) -> None:
    """Kueue admits the job again as soon as it has its quota back."""
    if attempt_runs(cluster, 1):
        kueue.evict(cluster)
    kueue.works(cluster)


def it_leaves_and_enters_its_queue(cluster: ModelCluster, operator: Operator) -> None:
    it_is_suspended_and_resumed(cluster, operator)
    kueue.works(cluster)


def it_goes_up(cluster: ModelCluster, _: Operator) -> None:
    passes_rungs(cluster, lost=2, passed=(1, 3))


def passes_rungs(cluster: ModelCluster, *, lost: int, passed: tuple[int, int]) -> None:
    """Every rung passes, and on the second one a worker is lost on the way."""
    if attempt_runs(cluster, lost):
        kubelet.end(cluster, cluster.pods[f"digits-{lost}-0-1"], 137)
    for attempt in passed:
        if attempt_runs(cluster, attempt):
            rung = {
                "firstLoss": 2.0,
                "lastLoss": 1.0,
                "averaged": 5,
                "errorsFallen": 9.0,
                "recompilations": 0,
                "notFinite": 0,
            }
            message = {"outcome": "Succeeded", "message": "", "step": 20, "examplesPerSecond": 100.0}
            message |= {"rung": rung | {"findings": {}}}
            for pod in present(cluster):
                kubelet.end(cluster, pod, message=json.dumps(message))


def it_goes_up_in_its_queue(cluster: ModelCluster, _: Operator) -> None:
    """Between two rungs is an attempt that waits for the quota of the next one."""
    passes_rungs(cluster, lost=3, passed=(1, 4))
    kueue.works(cluster)


def it_moves_in_its_queue_and_comes_back(cluster: ModelCluster, operator: Operator) -> None:
    """Evicted from its first slice, it gets quota for the second one only, and then for the first one again."""
    attempt = cluster.status.attempt
    if attempt_runs(cluster, 1):
        kueue.evict(cluster, number=0)
    if attempt_runs(cluster, 3):
        kubelet.report(cluster, 10, to=operator.inboxes)
    kueue.works(cluster, free={0} if attempt == 0 else {1} if attempt < 3 else {0, 1})


def no_loss_falls(cluster: ModelCluster, _: Operator) -> None:
    if attempt_runs(cluster, 1):
        all_finish(cluster)


RUNGS = [{"slice": {"acceleratorType": f"v5litepod-{chips}"}, "steps": 20} for chips in (4, 8)]
LADDER = {"spec.ladder.rungs": RUNGS, "spec.slice.acceleratorType": "v5litepod-16"}

PLACEMENT = {
    "alternatives": [{"slice": {"acceleratorType": "v5litepod-4"}, "waitForPreviousSeconds": 60}],
    "returnToPreferred": "AtCheckpoint",
    "minRunSeconds": 60,
}
MOVES = {"spec.placement": PLACEMENT, "spec.checkpoint": {"uri": "gs://bucket/jobs"}}

STORIES = {
    "ladder": Story(it_goes_up, 4, "AllWorkersSucceeded", job=LADDER),
    "failed gate": Story(no_loss_falls, 0, "GateFailed", job=LADDER),
    "nothing happens": Story(nothing, 1, "AllWorkersSucceeded"),
    "restart": Story(a_worker_is_killed, 2, "AllWorkersSucceeded"),
    "spent budget": Story(
        a_worker_is_killed, 2, "NotRetryable", {"restart": {"limits": [{"class": "Infrastructure", "max": 0}]}}
    ),
    "suspension": Story(it_is_suspended_and_resumed, 2, "AllWorkersSucceeded"),
    "lost node": Story(a_node_is_lost_and_known_to_be, 2, "AllWorkersSucceeded"),
    "silent node": Story(a_node_falls_silent, 2, "AllWorkersSucceeded"),
    "hang": Story(the_first_attempt_hangs, 2, "AllWorkersSucceeded", {"progressDeadlineSeconds": 120}),
    "deadline": Story(nothing, 0, "DeadlineExceeded", {"activeDeadlineSeconds": 100}),
    "time to live": Story(nothing, 1, "", {"ttlSecondsAfterFinished": 60}),
    "broken chips and a release": Story(a_node_has_broken_chips, 4, "AllWorkersSucceeded", spare_nodes=0),
    "eviction": Story(it_is_evicted_once, 2, "AllWorkersSucceeded", is_queued=True),
    "suspension in a queue": Story(it_leaves_and_enters_its_queue, 2, "AllWorkersSucceeded", is_queued=True),
    "ladder in a queue": Story(it_goes_up_in_its_queue, 6, "AllWorkersSucceeded", job=LADDER, is_queued=True),
    "moves in a queue": Story(
        it_moves_in_its_queue_and_comes_back, 4, "AllWorkersSucceeded", job=MOVES, is_queued=True
    ),
}


@dataclass(frozen=True)
class End:
    """Everything that must not depend on when the operator died. Goodput may: a new operator has heard no reports."""

    ready: tuple[str, str]
    attempt: int
    restarts: dict[str, int]
    avoided: list[str]
    faults: int
    failure: tuple[str, str] | None
    pods: dict[str, str]
    others: list[str]
    gone: bool
    gave_back: bool


def end_of(cluster: ModelCluster) -> End:
    status = cluster.status
    failure = status.last_failure
    return End(
        ready=("", "") if cluster.job_is_gone else reason(status),
        attempt=status.attempt,
        restarts=status.restarts.by_class,
        avoided=status.avoided_nodes,
        faults=len(status.device_faults),
        failure=failure and (failure.pod, failure.reason),
        pods={name: pod["status"]["phase"] for name, pod in sorted(cluster.pods.items())},
        others=sorted(cluster.others),
        gone=cluster.job_is_gone,
        gave_back=kueue.workload(cluster) is not None and kueue.seen(cluster).is_finished,
    )


def cluster_of(story: Story) -> ModelCluster:
    # Two hosts: with more, the same effects follow each other more often.
    changes = {"spec.slice.acceleratorType": "v5litepod-8", **story.job}
    cluster = ModelCluster(changes | ({"spec.runPolicy": story.policy} if story.policy else {}), listens=True)
    if story.is_queued:
        kueue.put_in_queue(cluster)
    return cluster


def told(story: Story, lives_for: int | None) -> tuple[End, int]:
    """How the story ends, and after how many effects, with an operator that dies after this many effects and is
    started again."""
    cluster = cluster_of(story)
    operator, left, effects, follows = Operator(cluster), lives_for, 0, False
    nodes = [*NODES, *(f"spare-{i}" for i in range(story.spare_nodes))]
    for _ in range(ENOUGH_PASSES):
        done = operator.work(lives_for=left, follows=follows)
        effects, follows = effects + len(done.effects), done.error is None and done.again == AT_ONCE
        left = None if left is None or isinstance(done.error, Crash) else left - len(done.effects)
        cluster.now += done.again or timedelta(0)
        story.trouble(cluster, operator)
        kubelet.sweep(cluster)
        cluster.collect_garbage()
        place_all(cluster, nodes)
        if attempt_runs(cluster, story.lasts):
            all_finish(cluster)
        if done.again is None and done.error is None and not done.effects and end_of(cluster).ready[1] == story.end:
            break
        all_are_placed_ready(cluster)
    else:
        raise AssertionError(f"this does not come to an end: {end_of(cluster)}")
    return end_of(cluster), effects


def all_are_placed_ready(cluster: ModelCluster) -> None:
    for pod in cluster.pods.values():
        if "nodeName" in pod["spec"]:
            kubelet.make_ready(cluster, pod)


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_a_crash_after_any_effect_does_not_change_the_outcome(story: Story) -> None:
    undisturbed, effects = told(story, None)
    assert undisturbed.ready[1] == story.end
    ends = {effect: told(story, effect)[0] for effect in range(effects + 1)}
    assert {effect: end for effect, end in ends.items() if end != undisturbed} == {}


def test_each_story_contains_what_its_name_says() -> None:
    ends = {name: told(story, None)[0] for name, story in STORIES.items()}
    restarts = {name: (end.attempt, end.restarts) for name, end in ends.items()}
    assert restarts == {
        "ladder": (4, {"Infrastructure": 1}),
        "failed gate": (1, {}),
        "nothing happens": (1, {}),
        "restart": (2, {"Infrastructure": 1}),
        "spent budget": (1, {}),
        "suspension": (2, {}),
        "lost node": (2, {"Infrastructure": 1}),
        "silent node": (2, {"Infrastructure": 1}),
        "hang": (2, {"Hang": 1}),
        "deadline": (1, {}),
        "time to live": (1, {}),
        "broken chips and a release": (4, {"Infrastructure": 2}),
        "eviction": (2, {}),
        "suspension in a queue": (2, {}),
        "ladder in a queue": (6, {"Infrastructure": 1}),
        "moves in a queue": (4, {}),
    }
    assert {name for name, end in ends.items() if end.gave_back} == {
        name for name in STORIES if STORIES[name].is_queued
    }
    assert [name for name, end in ends.items() if end.gone] == ["time to live"]
    # The worker that failed last is kept for its log.
    kept = {end.failure[0] for end in ends.values() if end.failure}
    left = {
        name: {pod.split("-")[1] for pod in end.pods if end.attempt == 1 or pod not in kept}
        for name, end in ends.items()
        if name != "time to live"
    }
    assert left == {name: {str(ends[name].attempt)} if name != "deadline" else set() for name in left}
