"""A training on a node that is drained. `test_moves` has one on a node that is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.object_storage import ObjectStorage
from tests.e2e.chronicle import Recoveries, recovery
from tests.e2e.operator_pod import operator_pod
from tests.e2e.training import Training, result, started


@pytest.fixture
def victim(cluster: Cluster, quick_start: dict[str, str], alone: None) -> str:
    """The node without the operator."""
    if not cluster.owns_nodes:
        pytest.skip("takes nodes away; this cluster is somebody else's")
    return next(node for node in cluster.nodes if node != operator_pod(cluster)["spec"]["nodeName"])


@contextmanager
def placed(cluster: Cluster, storage: ObjectStorage, node: str, pace: float, **spec: Any) -> Iterator[Training]:
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


def test_a_drained_node_costs_no_work_and_nothing_of_the_budget_for_crashes(
    cluster: Cluster, storage: ObjectStorage, victim: str, undisturbed: Object, recoveries: Recoveries
) -> None:
    labels = {"e2e": "drained"}
    with placed(cluster, storage, victim, 0.1, trainer={"podLabels": labels}) as training:
        training.wait_checkpoint()
        try:
            # Their /dev/shm is an emptyDir with nothing worth keeping.
            cluster.kubectl(
                "drain", victim, "--pod-selector=e2e=drained", "--delete-emptydir-data", kubectl_timeout(60)
            )
            saved = training.checkpoint()
            status = training.wait_ended()
        finally:
            cluster.kubectl("uncordon", victim)
        log = training.log(2)
    recoveries["node drained"] = recovery(training.chronicle, 2)

    failure = status["firstFailure"]
    assert (failure["class"], failure["reason"], failure["node"]) == ("Preemption", "EvictionByEvictionAPI", victim)
    assert status["restarts"]["byClass"] == [{"class": "Preemption", "count": 1}]
    assert training.chronicle.attempts() == [1, 2]
    # Each worker was told to stop, saved its progress, and said so.
    assert f"continues from checkpoint step-{saved:08d}" in log
    assert f"with step {saved + 1} of" in log
    assert (status["state"], result(status)) == ("Succeeded", undisturbed)
