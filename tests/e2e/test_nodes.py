"""The real nodes under the other tests of this folder: what a pod can rely on there."""

from collections.abc import Iterator

import pytest

from tests.cluster.api import ApiError, Object
from tests.cluster.cluster import Cluster
from tests.cluster.images import Image
from tests.cluster.namespaces import fresh_namespace
from tests.cluster.nodes import NODE_GRACE_SECONDS
from tests.cluster.processes import wait_until
from tests.e2e import pods
from tests.e2e.space import RESTRICTED

ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"
# Waiting limits, not expectations: a loaded machine is slow.
LOSS_SECONDS = NODE_GRACE_SECONDS + 50
GONE_SECONDS = 60.0

TPU = {"requests": {"google.com/tpu": "4"}, "limits": {"google.com/tpu": "4"}}
TOLERATES_TPU = {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}
LEAVES_LOST_NODES_AT_ONCE = [
    {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    for why in ("not-ready", "unreachable")
]


@pytest.fixture(autouse=True)
def _own_nodes(cluster: Cluster) -> None:
    if not cluster.owns_nodes:
        pytest.skip("about the nodes that the tests start themselves; this cluster is somebody else's")


@pytest.fixture(scope="module")
def together(cluster: Cluster) -> Iterator[str]:
    """A namespace for the tests that leave `peers` as they are."""
    with fresh_namespace(cluster.api, RESTRICTED) as name:
        yield name


@pytest.fixture(scope="module")
def peers(cluster: Cluster, together: str, python_image: Image) -> list[str]:
    """Two Ready pods in `together`, see `made_peers`."""
    return made_peers(cluster, together, python_image)


def made_peers(cluster: Cluster, namespace: str, image: Image) -> list[str]:
    """Makes two Ready pods of the headless Service `peers`, one on each node."""
    service = {"kind": "Service", "apiVersion": "v1", "metadata": {"name": "peers"}}
    spec = {"clusterIP": "None", "selector": {"app": "peers"}, "publishNotReadyAddresses": True}
    cluster.api.call("POST", f"/api/v1/namespaces/{namespace}/services", service | {"spec": spec})
    names = [f"on-{node}" for node in cluster.nodes]
    for name, node in zip(names, cluster.nodes, strict=True):
        pods.create(cluster, namespace, pods.restricted_pod(name, image, node=node))
    pods.wait_ready(cluster, namespace, *names)
    return names


@pytest.fixture
def tpu_node(cluster: Cluster) -> Iterator[str]:
    name = cluster.nodes[1]
    cluster.make_tpu_node(name, "tpu-v5-lite-podslice", "2x2", chips=4, pool="v5e")
    yield name
    cluster.make_plain_node(name)


def node(cluster: Cluster, name: str) -> Object:
    return cluster.api.call("GET", f"/api/v1/nodes/{name}")


def tpu_pod(name: str, image: Image) -> Object:
    pod = pods.restricted_pod(name, image, tolerations=[TOLERATES_TPU])
    pod["spec"]["containers"][0]["resources"] = TPU
    return pod


def test_both_nodes_take_pods(cluster: Cluster) -> None:
    assert len(cluster.nodes) == 2
    cluster.wait_schedulable()


def test_a_pod_reaches_the_pod_of_the_other_node_by_its_name(cluster: Cluster, together: str, peers: list[str]) -> None:
    for asking, asked in (peers, reversed(peers)):
        url = f"http://{asked}.peers:{pods.PORT}"
        answer = cluster.kubectl("exec", "-n", together, asking, "--", "python3", "-c", ASK, url)
        assert answer.stdout.strip() == asked


def test_a_pod_reaches_the_api_server_through_its_service(cluster: Cluster, together: str, peers: list[str]) -> None:
    ask = "import socket; print(socket.create_connection(('kubernetes.default', 443), 10).getpeername()[0])"
    answer = cluster.kubectl("exec", "-n", together, peers[0], "--", "python3", "-c", ask)
    assert answer.stdout.strip() == "10.96.0.1"


def test_logs_show_what_a_container_printed(cluster: Cluster, together: str, peers: list[str]) -> None:
    for name in peers:
        assert cluster.kubectl("logs", "-n", together, name).stdout == f"this is {name}\n"


def test_deleted_pods_leave_no_container(cluster: Cluster, namespace: str, python_image: Image) -> None:
    made_peers(cluster, namespace, python_image)
    running = {name: cluster.running_containers(name) for name in cluster.nodes}
    ours = {name: {item for item in ids if item in _containers(cluster, namespace)} for name, ids in running.items()}
    assert all(ours.values())
    cluster.kubectl("delete", "pod", "-n", namespace, "--all", "--wait")
    wait_until(
        lambda: not any(ours[name] & cluster.running_containers(name) for name in cluster.nodes),
        timeout=GONE_SECONDS,
        what="no container of the deleted pods runs",
    )


def test_a_restricted_namespace_refuses_a_privileged_pod(cluster: Cluster, namespace: str, python_image: Image) -> None:
    pod = pods.restricted_pod("mighty", python_image)
    pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(ApiError, match=r'violates PodSecurity "restricted:latest": privileged'):
        pods.create(cluster, namespace, pod)


def test_a_tpu_pod_runs_on_the_tpu_node_only(
    cluster: Cluster, namespace: str, python_image: Image, tpu_node: str
) -> None:
    for name in ("first", "second"):
        pods.create(cluster, namespace, tpu_pod(name, python_image))
        if name == "first":
            pods.wait_ready(cluster, namespace, name)
    first = pods.get(cluster, namespace, "first")
    assert first["spec"]["nodeName"] == tpu_node

    def refused() -> bool:
        return "Insufficient google.com/tpu" in pods.condition(
            pods.get(cluster, namespace, "second"), "PodScheduled"
        ).get("message", "")

    wait_until(refused, timeout=GONE_SECONDS, what="the second pod finds no chips")


def test_a_tpu_node_keeps_its_chips_when_its_kubelet_starts_again(cluster: Cluster, tpu_node: str) -> None:
    cluster.stop_kubelet(tpu_node)
    cluster.start_kubelet(tpu_node)
    assert node(cluster, tpu_node)["status"]["allocatable"]["google.com/tpu"] == "4"


def test_a_node_without_a_kubelet_is_lost_and_its_pod_is_disrupted(
    cluster: Cluster, namespace: str, python_image: Image
) -> None:
    pod = pods.restricted_pod("lost", python_image, node=cluster.nodes[1], tolerations=LEAVES_LOST_NODES_AT_ONCE)
    pods.create(cluster, namespace, pod)
    pods.wait_ready(cluster, namespace, "lost")
    cluster.stop_kubelet(cluster.nodes[1])
    try:
        wait_until(
            lambda: pods.condition(node(cluster, cluster.nodes[1]), "Ready")["status"] == "Unknown",
            timeout=LOSS_SECONDS,
            what="the node is not Ready",
        )
        wait_until(
            lambda: "deletionTimestamp" in (pods.get(cluster, namespace, "lost") or {}).get("metadata", {}),
            timeout=LOSS_SECONDS,
            what="the pod on node-1 is being deleted",
        )
        disrupted = pods.condition(pods.get(cluster, namespace, "lost"), "DisruptionTarget")
        assert (disrupted["status"], disrupted["reason"]) == ("True", "DeletionByTaintManager")
    finally:
        cluster.start_kubelet(cluster.nodes[1])


def test_a_killed_host_takes_its_pods_along_and_can_start_again(
    cluster: Cluster, namespace: str, python_image: Image
) -> None:
    asking, asked = made_peers(cluster, namespace, python_image)
    cluster.kill_host(cluster.nodes[1])
    try:
        wait_until(
            lambda: pods.condition(node(cluster, cluster.nodes[1]), "Ready")["status"] == "Unknown",
            timeout=LOSS_SECONDS,
            what="the node is not Ready",
        )
        url = f"http://{asked}.peers:{pods.PORT}"
        answer = cluster.kubectl("exec", "-n", namespace, asking, "--", "python3", "-c", ASK, url, check=False)
        assert answer.returncode != 0
    finally:
        cluster.start_host(cluster.nodes[1])
    pods.create(cluster, namespace, pods.restricted_pod("later", python_image, node=cluster.nodes[1]))
    pods.wait_ready(cluster, namespace, "later")


def _containers(cluster: Cluster, namespace: str) -> set[str]:
    """The container ids of the namespace's pods."""
    listed = cluster.api.call("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    return {
        status["containerID"].removeprefix("containerd://")
        for pod in listed
        for status in pod["status"]["containerStatuses"]
    }
