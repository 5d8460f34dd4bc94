"""Simulated nodes do what the tests of the operator rely on."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.api import ApiError, Object
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.kwok import NodePool, SimulatedSlice, add_cpu_nodes, add_tpu_nodes, finish_pod, remove_nodes

V5E_2X4 = SimulatedSlice("tpu-v5-lite-podslice", "2x4", hosts=2, chips_per_host=4)


@pytest.fixture
def tpu_pool(control_plane: ControlPlane) -> Iterator[NodePool]:
    pool = add_tpu_nodes(control_plane, V5E_2X4)
    yield pool
    remove_nodes(control_plane, pool)


@pytest.fixture
def cpu_pool(control_plane: ControlPlane) -> Iterator[NodePool]:
    pool = add_cpu_nodes(control_plane, 1)
    yield pool
    remove_nodes(control_plane, pool)


def pod(name: str, **spec: object) -> Object:
    containers = [{"name": "main", "image": "example.test/none:1"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": containers, **spec},
    }


def tpu_pod(name: str) -> Object:
    chips = {"google.com/tpu": "4"}
    resources = {"requests": chips, "limits": chips}
    return pod(
        name,
        nodeSelector={"cloud.google.com/gke-tpu-topology": "2x4"},
        tolerations=[{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
        containers=[{"name": "main", "image": "example.test/none:1", "resources": resources}],
    )


def create(cluster: ControlPlane, namespace: str, item: Object) -> None:
    cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(item))


def await_ready(cluster: ControlPlane, namespace: str, name: str) -> Object:
    cluster.kubectl("wait", "-n", namespace, f"pod/{name}", "--for=condition=Ready", kubectl_timeout(60))
    return get(cluster, namespace, name)


def get(cluster: ControlPlane, namespace: str, name: str) -> Object:
    return cluster.api.call("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")


def test_each_host_of_a_slice_takes_one_worker_and_nothing_else(
    control_plane: ControlPlane, namespace: str, tpu_pool: NodePool, cpu_pool: NodePool
) -> None:
    for item in (tpu_pod("first"), tpu_pod("second"), pod("plain")):
        create(control_plane, namespace, item)
    first, second, plain = (
        await_ready(control_plane, namespace, name)["spec"]["nodeName"] for name in ("first", "second", "plain")
    )
    assert {first, second} == set(tpu_pool.nodes)
    assert plain in cpu_pool.nodes
    create(control_plane, namespace, tpu_pod("third"))
    refused = "--for=jsonpath={.status.conditions[?(@.type=='PodScheduled')].reason}=Unschedulable"
    control_plane.kubectl("wait", "-n", namespace, "pod/third", refused, kubectl_timeout(60))


@pytest.mark.parametrize(
    ("exit_code", "reason", "phase", "shown_reason"),
    [
        (0, None, "Succeeded", "Completed"),
        (75, None, "Failed", "Error"),
        (137, "OOMKilled", "Failed", "OOMKilled"),
    ],
)
def test_finish_pod_ends_a_pod_as_a_kubelet_would(
    control_plane: ControlPlane,
    namespace: str,
    cpu_pool: NodePool,
    exit_code: int,
    reason: str | None,
    phase: str,
    shown_reason: str,
) -> None:
    create(control_plane, namespace, pod("worker"))
    finish_pod(control_plane, namespace, "worker", exit_code, message='{"step": 7}', reason=reason)
    status = get(control_plane, namespace, "worker")["status"]
    (container,) = status["containerStatuses"]
    (ready,) = (c["status"] for c in status["conditions"] if c["type"] == "Ready")
    ended = container["state"]["terminated"]
    assert (status["phase"], ready) == (phase, "False")
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (exit_code, shown_reason, '{"step": 7}')
    assert ended["startedAt"] <= ended["finishedAt"]


def test_finish_pod_refuses_a_pod_that_a_kubelet_would_restart(
    control_plane: ControlPlane, namespace: str, cpu_pool: NodePool
) -> None:
    create(control_plane, namespace, pod("worker", restartPolicy="OnFailure"))
    with pytest.raises(ValueError, match="restartPolicy OnFailure"):
        finish_pod(control_plane, namespace, "worker", 1)


def test_a_restarted_api_server_has_the_same_pods_and_runs_new_ones(
    control_plane: ControlPlane, namespace: str, cpu_pool: NodePool
) -> None:
    create(control_plane, namespace, pod("before"))
    before = await_ready(control_plane, namespace, "before")
    control_plane.restart_apiserver()
    assert get(control_plane, namespace, "before")["metadata"]["uid"] == before["metadata"]["uid"]
    create(control_plane, namespace, pod("after"))
    await_ready(control_plane, namespace, "after")
    assert control_plane.problem() is None


def test_a_refused_call_says_what_the_server_said(control_plane: ControlPlane) -> None:
    with pytest.raises(ApiError, match='404: pods "absent" not found'):
        get(control_plane, "default", "absent")
