"""Worker pods as the API server and the scheduler take them: the restricted level, and nodes that are to be avoided."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import SimulatedSlice, add_tpu_nodes, remove_nodes
from tests.cluster.namespaces import fresh_namespace
from tests.cluster.processes import wait_until
from tests.controlplane.jobs import digits
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.gang import config_map
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.report import Reporting
from tpu_training_operator.domain.resolve import resolve
from tpu_training_operator.domain.worker_pod import worker_pod

Object = dict[str, Any]

FIRST = WorkerId(1, 0, 0)
FOUR_HOSTS = SimulatedSlice("tpu-v5-lite-podslice", "4x4", 4, 4)
REPORTING = Reporting("https://operator.tpu-system.svc:8443", "-----BEGIN CERTIFICATE-----\n")
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}
OWN_LOOP = {"image": "registry.example/digits:1", "command": ["python", "train.py"]}


def objects(namespace: str, *avoid: str, trainer: Object | None = None) -> tuple[Object, Object]:
    """The ConfigMap and the first pod of a job on four TPU hosts."""
    body = digits(slice={"acceleratorType": "v5litepod-16", "hardware": "TPU"})
    body["spec"]["trainer"] = trainer or body["spec"]["trainer"]
    body["metadata"] |= {"namespace": namespace, "uid": "00000000-0000-0000-0000-000000000000"}
    job = parse_job(body)
    resolution = resolve(job.spec)
    made = config_map(job, resolution, 1, REPORTING), worker_pod(job, resolution, FIRST, REPORTING, avoid)
    for each in made:
        # Of no job that there is: the garbage collector would take them at once.
        del each["metadata"]["ownerReferences"]
    return made


@pytest.mark.parametrize("trainer", [None, OWN_LOOP], ids=["an entrypoint", "a loop of one's own"])
def test_a_restricted_namespace_admits_a_worker_that_reports(
    control_plane: ControlPlane, trainer: Object | None
) -> None:
    with fresh_namespace(control_plane.api, RESTRICTED) as namespace:
        for kind, body in zip(("configmaps", "pods"), objects(namespace, "node-a", trainer=trainer), strict=True):
            stored = control_plane.api.call("POST", f"/api/v1/namespaces/{namespace}/{kind}?dryRun=All", body)
    (volume,) = (v for v in stored["spec"]["volumes"] if v["name"] == "tpu-training-progress")
    # What the API server has not understood, it would have left out.
    assert volume["projected"] == next(v for v in body["spec"]["volumes"] if v["name"] == volume["name"])["projected"]


def test_the_scheduler_places_no_pod_on_a_node_that_it_is_to_avoid(control_plane: ControlPlane, namespace: str) -> None:
    pool = add_tpu_nodes(control_plane, FOUR_HOSTS)
    try:
        pods = f"/api/v1/namespaces/{namespace}/pods"
        for index, free in enumerate(pool.nodes):
            (_, pod) = objects(namespace, *(node for node in pool.nodes if node != free))
            pod["metadata"]["name"] = f"only-there-{index}"
            control_plane.api.call("POST", pods, pod)

        def nodes() -> list[str | None]:
            found = control_plane.api.call("GET", pods)["items"]
            return [pod["spec"].get("nodeName") for pod in sorted(found, key=lambda pod: str(pod["metadata"]["name"]))]

        wait_until(lambda: None not in nodes(), timeout=60, what="all pods have nodes")
        assert nodes() == list(pool.nodes)
    finally:
        remove_nodes(control_plane, pool)
