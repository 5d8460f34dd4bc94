"""A training that hangs, and then has its node drained. `test_moves` has one on a node that is lost."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.object_storage import ObjectStorage
from tests.e2e import containers
from tests.e2e.chronicle import Chronicle, Recoveries, recovery
from tests.e2e.operator_pod import operator_pod
from tests.e2e.paced import LAST_PACED
from tests.e2e.pods import ended_with
from tests.e2e.training import NAME, Training, result, started
from tpu_contract.protocol import WORKER_PHASES

# Slow enough that the drain comes before the end.
STEP_SECONDS = 0.2
# Long enough for a healthy worker that shares two cores with everything else.
HANG_SECONDS = 30


@pytest.fixture
def victim(cluster: Cluster, quick_start: dict[str, str], alone: None) -> str:
    """The node without the operator."""
    if not cluster.owns_nodes:
        pytest.skip("takes nodes away; this cluster is somebody else's")
    return next(node for node in cluster.nodes if node != operator_pod(cluster)["spec"]["nodeName"])


@contextmanager
def hung(cluster: Cluster, storage: ObjectStorage, node: str, **spec: Any) -> Iterator[Training]:
    """A job that has hung, and has started again and saved, all of it on one node; now it may use any node."""
    others = [other for other in cluster.nodes if other != node]
    env = {"TPU_TRAINER_HANG_SECONDS": str(HANG_SECONDS), LAST_PACED: "2"}
    cluster.kubectl("cordon", *others)
    try:
        with started(cluster, storage, STEP_SECONDS, env, **spec) as training:
            training.wait_attempt()
            saved = training.wait_checkpoint()
            containers.stop(training.pod(1))
            training.wait_attempt(2)
            cluster.kubectl("uncordon", *others)
            training.wait_checkpoint(after=saved)
            training.wait_start_told(2)
            yield training
    finally:
        cluster.kubectl("uncordon", *others)


def test_a_training_that_hangs_and_is_drained_ends_as_if_nothing_had_happened(
    cluster: Cluster, storage: ObjectStorage, victim: str, undisturbed: Object, recoveries: Recoveries
) -> None:
    labels = {"e2e": "drained"}
    with hung(cluster, storage, victim, trainer={"podLabels": labels}) as training:
        continued = training.log(2)
        try:
            # Their /dev/shm is an emptyDir with nothing worth keeping.
            cluster.kubectl(
                "drain", victim, "--pod-selector=e2e=drained", "--delete-emptydir-data", kubectl_timeout(60)
            )
            saved = training.checkpoint()
            status = training.wait_ended()
        finally:
            cluster.kubectl("uncordon", victim)
        log = training.log(3)
    told, failure = training.chronicle, status["firstFailure"]
    recoveries["worker stopped"], recoveries["node drained"] = recovery(told, 2), recovery(told, 3)

    # The worker that is stopped reports nothing; the one that waits for it does.
    assert struck(told) == {f"{NAME}-1-0-0"}
    hang = (1, f"{NAME}-1-0-0", victim, 71, "Hang", "Hung")
    assert tuple(failure[key] for key in ("attempt", "pod", "node", "exitCode", "class", "reason")) == hang
    assert re.search(r"hung for \d+ s in phase", failure["message"])
    again = status["starts"][1]
    assert (again["attempt"], again["cause"]) == (2, "Hang")
    steps = {"noticed", "queued", "backoff", "cleared", "bound", "started", *WORKER_PHASES}
    assert (again["seconds"].keys(), sum(again["seconds"].values())) == (steps, again["totalSeconds"])
    assert re.search(r"continues from checkpoint step-\d+", continued)

    failure = status["lastFailure"]
    assert (failure["class"], failure["reason"], failure["node"]) == ("Preemption", "EvictionByEvictionAPI", victim)
    counted = {restarts["class"]: restarts["count"] for restarts in status["restarts"]["byClass"]}
    assert (told.attempts(), counted) == ([1, 2, 3], {"Hang": 1, "Preemption": 1})
    # A drain costs no work: each worker was told to stop, saved its progress, and said so.
    assert f"continues from checkpoint step-{saved:08d}" in log
    assert f"with step {saved + 1} of" in log
    assert (status["state"], result(status)) == ("Succeeded", undisturbed)


def struck(told: Chronicle) -> set[str]:
    """The pods that had ended with the code of a hang when the second attempt was decided."""
    moments = told.moments()
    decided = next(m.version for m in moments if not m.is_pod and m.item.get("status", {}).get("attempt") == 2)
    return {m.name for m in moments if m.is_pod and m.version < decided and ended_with(71)(m.item)}
