"""The test cluster does what the other tests of this folder rely on."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.api import ApiError, Object
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import NodePool, SimulatedSlice, add_cpu_nodes, add_tpu_nodes, finish_pod, remove_nodes

V5E_2X4 = SimulatedSlice("tpu-v5-lite-podslice", "2x4", hosts=2, chips_per_host=4)
WAIT = "--timeout=60s"


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
    """A worker of one v5e host: the selector, the toleration and the chips."""
    chips = {"google.com/tpu": "4"}
    return pod(
        name,
        nodeSelector={
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
            "cloud.google.com/gke-tpu-topology": "2x4",
        },
        tolerations=[{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
        containers=[
            {
                "name": "main",
                "image": "example.test/none:1",
                "resources": {"requests": chips, "limits": chips},
            }
        ],
    )


def create(cluster: ControlPlane, namespace: str, item: Object) -> Object:
    created = cluster.kubectl("create", "-n", namespace, "-o", "json", "-f", "-", input=json.dumps(item))
    answer: Object = json.loads(created.stdout)
    return answer


def await_ready(cluster: ControlPlane, namespace: str, name: str) -> Object:
    cluster.kubectl("wait", "-n", namespace, f"pod/{name}", "--for=condition=Ready", WAIT)
    return get(cluster, namespace, name)


def get(cluster: ControlPlane, namespace: str, name: str) -> Object:
    return cluster.api.call("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")


def ready(status: Object) -> str:
    (answer,) = (c["status"] for c in status["conditions"] if c["type"] == "Ready")
    return str(answer)


def test_a_tpu_pod_gets_ready_on_a_node_of_its_slice(
    control_plane: ControlPlane, namespace: str, tpu_pool: NodePool
) -> None:
    create(control_plane, namespace, tpu_pod("worker"))
    assert await_ready(control_plane, namespace, "worker")["spec"]["nodeName"] in tpu_pool.nodes


def test_a_host_takes_one_worker_and_a_third_waits_for_chips(
    control_plane: ControlPlane, namespace: str, tpu_pool: NodePool
) -> None:
    for name in ("first", "second"):
        create(control_plane, namespace, tpu_pod(name))
    nodes = {await_ready(control_plane, namespace, name)["spec"]["nodeName"] for name in ("first", "second")}
    assert nodes == set(tpu_pool.nodes)
    create(control_plane, namespace, tpu_pod("third"))
    refused = "--for=jsonpath={.status.conditions[?(@.type=='PodScheduled')].reason}=Unschedulable"
    control_plane.kubectl("wait", "-n", namespace, "pod/third", refused, WAIT)


def test_a_pod_without_the_toleration_stays_off_tpu_nodes(
    control_plane: ControlPlane, namespace: str, tpu_pool: NodePool, cpu_pool: NodePool
) -> None:
    create(control_plane, namespace, pod("plain"))
    assert await_ready(control_plane, namespace, "plain")["spec"]["nodeName"] in cpu_pool.nodes


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
    ended = container["state"]["terminated"]
    assert (status["phase"], ready(status)) == (phase, "False")
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (exit_code, shown_reason, '{"step": 7}')
    assert ended["startedAt"] <= ended["finishedAt"]


def test_finish_pod_refuses_a_pod_that_a_kubelet_would_restart(
    control_plane: ControlPlane, namespace: str, cpu_pool: NodePool
) -> None:
    create(control_plane, namespace, pod("worker", restartPolicy="OnFailure"))
    with pytest.raises(ValueError, match="restartPolicy OnFailure"):
        finish_pod(control_plane, namespace, "worker", 1)


def test_deleting_an_owner_deletes_its_dependents(
    control_plane: ControlPlane, namespace: str, cpu_pool: NodePool
) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}
    owner = create(control_plane, namespace, config_map)
    dependent = pod("dependent")
    dependent["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    ]
    create(control_plane, namespace, dependent)
    await_ready(control_plane, namespace, "dependent")
    control_plane.kubectl("delete", "-n", namespace, "configmap/owner")
    control_plane.kubectl("wait", "-n", namespace, "pod/dependent", "--for=delete", WAIT)


def test_a_service_account_may_do_what_its_role_says_and_nothing_else(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl("create", "-n", namespace, "serviceaccount", "reader")
    control_plane.kubectl("create", "-n", namespace, "role", "reader", "--verb=list", "--resource=pods")
    control_plane.kubectl(
        "create", "-n", namespace, "rolebinding", "reader", "--role=reader",
        f"--serviceaccount={namespace}:reader",
    )  # fmt: skip
    kubeconfig = control_plane.service_account_kubeconfig(namespace, "reader")
    as_reader = (f"--kubeconfig={kubeconfig}", "-n", namespace, "auth", "can-i")
    answers = [control_plane.kubectl(*as_reader, verb, "pods", check=False).stdout for verb in ("list", "delete")]
    assert answers == ["yes\n", "no\n"]


def test_a_restarted_api_server_has_the_same_pods_and_runs_new_ones(
    control_plane: ControlPlane, namespace: str, cpu_pool: NodePool
) -> None:
    create(control_plane, namespace, pod("before"))
    before = await_ready(control_plane, namespace, "before")
    control_plane.restart_apiserver()
    assert get(control_plane, namespace, "before")["metadata"]["uid"] == before["metadata"]["uid"]
    create(control_plane, namespace, pod("after"))
    await_ready(control_plane, namespace, "after")


def test_a_refused_call_says_what_the_server_said(control_plane: ControlPlane) -> None:
    with pytest.raises(ApiError, match='404: pods "absent" not found'):
        get(control_plane, "default", "absent")
