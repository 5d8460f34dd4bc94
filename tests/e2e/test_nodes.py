"""The real nodes under the other tests of this folder: what a pod can rely on there.

That nodes can be lost and killed and come back, and that no container outlives its pod, their own tests rely on.
"""

from collections.abc import Iterator

import pytest

from tests.cluster.api import ApiError, Object
from tests.cluster.cluster import Cluster
from tests.cluster.images import Image
from tests.cluster.namespaces import fresh_namespace
from tests.cluster.processes import wait_until
from tests.e2e import pods
from tests.e2e.space import RESTRICTED

ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"
# A waiting limit, not an expectation: a loaded machine is slow.
REFUSED_SECONDS = 60.0

TPU = {"requests": {"google.com/tpu": "4"}, "limits": {"google.com/tpu": "4"}}
TOLERATES_TPU = {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}


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
    """Two Ready pods of the headless Service `peers`, one on each node."""
    service = {"kind": "Service", "apiVersion": "v1", "metadata": {"name": "peers"}}
    spec = {"clusterIP": "None", "selector": {"app": "peers"}, "publishNotReadyAddresses": True}
    cluster.api.call("POST", f"/api/v1/namespaces/{together}/services", service | {"spec": spec})
    names = [f"on-{node}" for node in cluster.nodes]
    for name, node in zip(names, cluster.nodes, strict=True):
        pods.create(cluster, together, pods.restricted_pod(name, python_image, node=node))
    pods.wait_ready(cluster, together, *names)
    return names


@pytest.fixture
def tpu_node(cluster: Cluster) -> Iterator[str]:
    name = cluster.nodes[1]
    cluster.make_tpu_node(name, "tpu-v5-lite-podslice", "2x2", chips=4, pool="v5e")
    yield name
    cluster.make_plain_node(name)


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

    wait_until(refused, timeout=REFUSED_SECONDS, what="the second pod finds no chips")
