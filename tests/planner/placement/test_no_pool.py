"""A slice for which the cluster has no node pool: who has to say so, and what is not enough."""

import pytest

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import one_pass
from tests.planner.restarts.test_waiting import finds_no_node, tell, waits
from tests.planner.story import WORKERS, given_a_created_gang, given_a_running_gang, passes, ready_message
from tpu_training_operator.domain.cluster_state.pod_events import autoscaler_has_no_pool, explain_no_matching_node

ALTERNATIVE = {"slice": {"acceleratorType": "v5litepod-8"}, "waitForPreviousSeconds": 600}
TWO = {"spec.placement.alternatives": [ALTERNATIVE]}
OTHER = "node(s) didn't match Pod's node affinity/selector"
GPU = "node(s) had untolerated taint {nvidia.com/gpu: present}"
NO_NODE = f"0/12 nodes are available: 12 {OTHER}. preemption: 0/12 nodes are available: 12 Preemption is not helpful."
NO_GROUP = f"pod didn't trigger scale-up: 3 {OTHER}"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (NO_NODE, True),
        # Kubernetes 1.35, where a plugin besides preemption has a say.
        (NO_NODE.replace("preemption:", "no new claims to deallocate, preemption:"), True),
        (f"0/12 nodes are available: 12 {OTHER}.", True),
        (f"0/12 nodes are available: 11 {OTHER}, 1 {GPU}.", True),
        # A node that has what the worker selects, and cannot take it now.
        (f"0/12 nodes are available: 8 {OTHER}, 4 Insufficient google.com/tpu.", False),
        (f"0/12 nodes are available: 8 {OTHER}, 4 node(s) were unschedulable.", False),
        (
            f"0/12 nodes are available: 8 {OTHER}, 4 node(s) had untolerated taint {{node.kubernetes.io/not-ready: }}.",
            False,
        ),
        (f"0/12 nodes are available: 8 {OTHER}.", False),
        ("0/0 nodes are available: ", False),
        ("", False),
        (f"0/12 nodes are available: 12 {OTHER}, and more", False),
    ],
)
def test_the_scheduler_has_to_rule_out_every_node(message: str, expected: bool) -> None:
    assert (explain_no_matching_node(message) is not None) is expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("NotTriggerScaleUp", NO_GROUP)], True),
        ([("NotTriggerScaleUp", f"{NO_GROUP}, 2 {GPU}")], True),
        ([("NotTriggerScaleUp", NO_GROUP.replace(":", " (it wouldn't fit if a new node is added):"))], True),
        # A pool for the slice exists, and may be at zero nodes.
        ([("NotTriggerScaleUp", f"{NO_GROUP}, 1 max node group size reached")], False),
        ([("NotTriggerScaleUp", f"pod didn't trigger scale-up: 1 in backoff after failed scale-up, 3 {OTHER}")], False),
        ([("NotTriggerScaleUp", f"{NO_GROUP}, 1 Insufficient google.com/tpu")], False),
        ([("NotTriggerScaleUp", NO_GROUP), ("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 not ready")], False),
        ([("NotTriggerScaleUp", NO_GROUP), ("FailedScaleUp", "GCE out of resources")], False),
        ([("NotTriggerScaleUp", NO_GROUP), ("TriggeredScaleUp", "pod triggered scale-up")], False),
        # It knows no pools at all, or the rest of the note was cut off.
        ([("NotTriggerScaleUp", "pod didn't trigger scale-up: ")], False),
        ([("NotTriggerScaleUp", f"pod didn't trigger scale-up: {', '.join([f'1 {OTHER}'] * 9)}")], False),
        ([("FailedScheduling", NO_NODE)], False),
        ([], False),
    ],
)
def test_the_autoscaler_has_to_rule_out_every_pool(events: list[tuple[str, str]], expected: bool) -> None:
    assert autoscaler_has_no_pool([{"reason": reason, "note": note} for reason, note in events]) is expected


def given_a_gang_without_nodes(scheduler: str = NO_NODE, autoscaler: str = NO_GROUP, *, fixed: bool) -> ModelCluster:
    cluster = given_a_created_gang(TWO)
    cluster.fixed_node_pools = fixed
    # An operator that is told so.
    cluster.operator = None
    for name in WORKERS:
        finds_no_node(cluster, name, scheduler)
        tell(cluster, name, "NotTriggerScaleUp", autoscaler, "Normal")
    return cluster


def runs_on(cluster: ModelCluster) -> str:
    assert cluster.status.placement is not None
    return cluster.status.placement.slice


def test_a_gang_leaves_a_slice_without_a_pool_at_once_and_says_why() -> None:
    cluster = given_a_gang_without_nodes(fixed=True)
    waits(cluster, 30)
    placement = cluster.status.placement
    assert placement is not None
    assert (placement.slice, placement.reason) == ("v5litepod-8", "NotAdmitted")
    why = f"the cluster has no node pool for v5litepod-16: 0/12 nodes are available: 12 {OTHER}."
    assert placement.moves[-1].why == why
    assert why in ready_message(cluster)


@pytest.mark.parametrize(
    "cluster",
    [
        lambda: given_a_gang_without_nodes(fixed=False),
        lambda: given_a_gang_without_nodes(f"0/12 nodes are available: 12 {OTHER}, 1 more", fixed=True),
        lambda: given_a_gang_without_nodes(autoscaler=f"{NO_GROUP}, 1 max node group size reached", fixed=True),
    ],
    ids=["pools may be created", "the scheduler has doubts", "a pool is at its limit"],
)
def test_whatever_is_not_certain_is_waited_for(cluster: object) -> None:
    waiting = cluster()  # type: ignore[operator]
    waits(waiting, 599)
    assert runs_on(waiting) == "v5litepod-16"
    waits(waiting, 20)
    assert runs_on(waiting) == "v5litepod-8"


def test_a_slice_that_is_lost_had_its_nodes_and_is_waited_for() -> None:
    cluster = given_a_running_gang(TWO)
    cluster.fixed_node_pools = True
    cluster.operator = None
    passes(cluster, 60)
    for pod in list(cluster.pods.values()):
        kubelet.lose_node_for_good(cluster, pod)
    one_pass(cluster)
    cluster.pods.clear()
    for _ in range(3):
        one_pass(cluster)
    for name in list(cluster.pods):
        finds_no_node(cluster, name, NO_NODE)
        tell(cluster, name, "NotTriggerScaleUp", NO_GROUP, "Normal")
    waits(cluster, 300)
    assert runs_on(cluster) == "v5litepod-16"
