"""A training on a node that is drained, and a job on one that is lost while its workers keep running."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.api import Object
from tests.cluster.nodes import NODE_GRACE_SECONDS, RealCluster
from tests.cluster.object_storage import ObjectStorage
from tests.cluster.processes import wait_until
from tests.e2e import containers, pods
from tests.e2e.chronicle import Recoveries, recovery
from tests.e2e.operator_pod import operator_pod
from tests.e2e.training import HOSTS, NAME, OWN_LOOP, Training, result, started

# Waiting limits, not expectations.
LOSS_SECONDS = NODE_GRACE_SECONDS + 180
GONE_SECONDS = 60.0


@pytest.fixture
def victim(cluster: RealCluster, quick_start: dict[str, str]) -> str:
    """The node without the operator."""
    if not cluster.owns_nodes:
        pytest.skip("takes nodes away; this cluster is somebody else's")
    return next(node for node in cluster.nodes if node != operator_pod(cluster)["spec"]["nodeName"])


@contextmanager
def placed(cluster: RealCluster, storage: ObjectStorage, node: str, pace: float, **spec: Any) -> Iterator[Training]:
    """A running job, all of it on one node; after that it may use any node."""
    others = [other for other in cluster.nodes if other != node]
    cluster.kubectl("cordon", *others)
    try:
        with started(cluster, storage, pace, **spec) as training:
            training.wait_attempt()
            cluster.kubectl("uncordon", *others)
            yield training
    finally:
        cluster.kubectl("uncordon", *others)


def nodes_of(training: Training, attempt: int) -> set[str]:
    told = training.chronicle.moments()
    found = [moment.item["spec"].get("nodeName") for moment in told if moment.is_pod and moment.attempt == attempt]
    return {node for node in found if node}


def test_a_drained_node_costs_no_work_and_nothing_of_the_budget_for_crashes(
    cluster: RealCluster, storage: ObjectStorage, victim: str, undisturbed: Object, recoveries: Recoveries
) -> None:
    labels = {"e2e": "drained"}
    with placed(cluster, storage, victim, 0.05, trainer={"podLabels": labels}) as training:
        training.wait_checkpoint()
        try:
            # Their /dev/shm is an emptyDir with nothing worth keeping.
            cluster.kubectl("drain", victim, "--pod-selector=e2e=drained", "--delete-emptydir-data", "--timeout=60s")
            saved = training.checkpoint()
            status = training.wait_ended()
        finally:
            cluster.kubectl("uncordon", victim)
        log = training.log(2)
    recoveries["node drained"] = recovery(training.chronicle, 2)

    failure = status["firstFailure"]
    assert (failure["class"], failure["reason"], failure["node"]) == ("Preemption", "EvictionByEvictionAPI", victim)
    assert status["restarts"]["byClass"] == {"Preemption": 1}
    assert training.chronicle.attempts() == [1, 2]
    # Each worker was told to stop, saved its progress, and said so.
    assert f"continues from checkpoint step-{saved:08d}" in log
    assert f"with step {saved + 1} of" in log
    assert (status["state"], result(status)) == ("Succeeded", undisturbed)


def test_a_gang_on_a_lost_node_is_replaced_although_it_keeps_running(
    cluster: RealCluster, storage: ObjectStorage, victim: str, recoveries: Recoveries
) -> None:
    with placed(cluster, storage, victim, pace=0.0, **OWN_LOOP) as training:
        cut_off = [training.pod(host) for host in range(HOSTS)]
        cluster.stop_kubelet(victim)
        try:
            training.chronicle.wait(
                lambda told: told.status() if told.status()["attempt"] == 2 else None,
                timeout=LOSS_SECONDS,
                what="attempt 2 has begun",
            )
            lost = pods.condition(cluster.api.call("GET", f"/api/v1/nodes/{victim}"), "Ready")
            training.wait_attempt(attempt=2)
            still_running = [bool(containers.processes(pod)) for pod in cut_off]
            status = training.wait_ended()
        finally:
            cluster.start_kubelet(victim)
        left = {containers.container_id(pod) for pod in cut_off}
        wait_until(
            lambda: not left & cluster.running_containers(victim),
            timeout=GONE_SECONDS,
            what="the kubelet has ended the workers of the first attempt",
        )
    recoveries["node lost"] = recovery(training.chronicle, 2)

    assert lost["status"] == "Unknown"
    assert still_running == [True] * HOSTS
    failure = status["firstFailure"]
    assert (failure["class"], failure["node"], failure["pod"]) == ("Infrastructure", victim, f"{NAME}-1-0-0")
    assert training.chronicle.attempts() == [1, 2]
    assert training.chronicle.created() == [f"{NAME}-{n}-0-{host}" for n in (1, 2) for host in range(HOSTS)]
    assert victim not in nodes_of(training, 2)
    assert status["restarts"]["byClass"] == {"Infrastructure": 1}
    assert status["state"] == "Succeeded"
