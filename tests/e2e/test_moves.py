"""A training whose node stops goes on with half of its hosts, and returns when the node does: its losses show nothing.

The node's kubelet stops, and its workers do not: the gang that was cut off trains and saves beside its successors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.deadlines import patience
from tests.cluster.nodes import NODE_GRACE_SECONDS
from tests.cluster.object_storage import ObjectStorage
from tests.cluster.processes import wait_until
from tests.e2e import containers, pods
from tests.e2e.chronicle import Chronicle, Recoveries, recovery
from tests.e2e.operator_pod import operator_pod
from tests.e2e.paced import LAST_PACED
from tests.e2e.training import NAME, Losses, Training, started

# Waiting limits, not expectations.
MOVE_SECONDS = NODE_GRACE_SECONDS + 290
GONE_SECONDS = 60.0

WISHED, SMALLER = "v5litepod-8", "v5litepod-4"
HOSTS, FEWER = 2, 1
"""Of the two. Two nodes stand for more: one has the chips of two hosts, the other those of one."""
CHIPS = 4
# Slow enough that the first attempts see all of the story.
PACE = 1.0
STEPS = 120
MOVES: dict[str, Any] = {
    "slice": {"acceleratorType": WISHED, "hardware": "CPU"},
    "trainer": {
        "resources": {"limits": {"google.com/tpu": str(CHIPS)}},
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
    },
    # The numbers of the undisturbed training, whose rate is constant: its first steps are the same.
    "recipe": {
        "globalBatchSize": 64,
        "trainSteps": STEPS,
        "optimizer": {"name": "sgd", "learningRate": 0.1, "momentum": 0.9},
    },
    "checkpoint": {"everySteps": 5},
}


@pytest.fixture
def nodes(cluster: Cluster, quick_start: dict[str, str], alone: None) -> Iterator[tuple[str, str]]:
    """One for all workers, and the operator's, for fewer. The first workers go to the first one."""
    if not cluster.owns_nodes:
        pytest.skip("takes nodes away; this cluster is somebody else's")
    small = operator_pod(cluster)["spec"]["nodeName"]
    [large] = [node for node in cluster.nodes if node != small]
    for node, hosts in ((large, HOSTS), (small, FEWER)):
        cluster.make_tpu_node(node, "tpu-v5-lite-podslice", "2x4", chips=hosts * CHIPS, pool="v5e")
    cluster.kubectl("cordon", small)
    yield large, small
    cluster.kubectl("uncordon", small)
    for node in cluster.nodes:
        cluster.make_plain_node(node)


@contextmanager
def without(cluster: Cluster, node: str) -> Iterator[None]:
    """The control plane loses the node within the block; what runs there goes on."""
    cluster.stop_kubelet(node)
    try:
        yield
    finally:
        cluster.start_kubelet(node)


def test_a_training_whose_node_stops_goes_on_with_half_its_hosts_and_comes_back(
    cluster: Cluster,
    storage: ObjectStorage,
    nodes: tuple[str, str],
    undisturbed_losses: Losses,
    recoveries: Recoveries,
) -> None:
    large, small = nodes
    smaller = {"slice": {"acceleratorType": SMALLER, "hardware": "CPU"}, "waitForPreviousSeconds": patience(5)}
    placement = {"alternatives": [smaller], "returnToPreferred": "AtCheckpoint", "minRunSeconds": 1}
    with started(cluster, storage, PACE, {LAST_PACED: "3"}, placement=placement, **MOVES) as training:
        training.wait_attempt()
        cut_off = [training.pod(host) for host in range(HOSTS)]
        cluster.kubectl("uncordon", small)
        training.wait_checkpoint()
        with without(cluster, large):
            wait_runs(training, 3, SMALLER)
            lost = pods.condition(cluster.api.call("GET", f"/api/v1/nodes/{large}"), "Ready")
            still_running = [bool(containers.processes(pod)) for pod in cut_off]
        wait_runs(training, 4, WISHED)
        status = training.wait_ended()
        losses, left = training.losses(), training.names("pods")
        old = {containers.container_id(pod) for pod in cut_off}
        wait_until(
            lambda: not old & cluster.running_containers(large),
            timeout=GONE_SECONDS,
            what="the kubelet has ended the workers of the first attempt",
        )
    told, found = training.chronicle, status["placement"]
    recoveries["node lost"] = recovery(told, 2)

    assert (lost["status"], still_running) == ("Unknown", [True] * HOSTS)
    failure = status["firstFailure"]
    # The control plane gives up on one pod after the other, in an order of its own.
    workers = [f"{NAME}-1-0-{host}" for host in range(HOSTS)]
    assert (failure["class"], failure["reason"]) == ("Infrastructure", "NodeLost")
    assert (failure["node"], failure["pod"] in workers) == (large, True)
    assert status["restarts"]["byClass"] == [{"class": "Infrastructure", "count": 1}]
    assert [(move["fromSlice"], move["toSlice"], move["reason"]) for move in found["moves"]] == [
        (WISHED, SMALLER, "Lost"),
        (SMALLER, WISHED, "Better"),
    ]
    assert set(found["chipSeconds"]) == {WISHED, SMALLER, "placeholders"}
    assert told.attempts() == [1, 2, 3, 4]
    assert nodes_of(told, 3) == {small}
    assert left == [f"{NAME}-4-0-{host}" for host in range(HOSTS)]
    assert (status["state"], status["progress"]["step"]) == ("Succeeded", STEPS)
    # The history has the steps of the attempts that could leave one: those from the restored step on.
    assert set(losses) >= set(range(found["moves"][1]["step"], STEPS + 1))
    assert losses == pytest.approx({step: undisturbed_losses[step] for step in losses}, abs=1e-5)


def wait_runs(training: Training, attempt: int, slice_: str) -> None:
    def runs(told: Chronicle) -> Object | None:
        status = told.status()
        now = (status.get("state"), status.get("attempt"), (status.get("placement") or {}).get("slice"))
        return status if now == ("Running", attempt, slice_) else None

    training.chronicle.wait(runs, timeout=MOVE_SECONDS, what=f"attempt {attempt} runs on {slice_}")


def nodes_of(told: Chronicle, attempt: int) -> set[str]:
    moments = [moment for moment in told.moments() if moment.is_pod and moment.name.startswith(f"{NAME}-{attempt}-")]
    return {node for moment in moments if (node := moment.item["spec"].get("nodeName"))}
