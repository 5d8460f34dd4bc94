"""The classifier's table reads what a real kubelet, container runtime and control plane write."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.images import Image
from tests.cluster.namespaces import fresh_namespace
from tests.cluster.processes import wait_until
from tests.e2e import pods
from tpu_training_operator.api.status import Failure
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.failures.first import first_failure
from tpu_training_operator.domain.job.naming import WorkerId, worker_labels

END_SECONDS = 90.0
# Later than every deadline in the table: the verdict depends on what the pod shows, not on how long it may take.
PATIENCE = timedelta(minutes=10)

HOST = WorkerId(1, 0, 0)
# In a case: the node on which all pods run; the second one is restarted.
NODE = "the first node"
PORT = 5055
# A registry that has no image and denies access to one path. The runtime uses no TLS on the node's own loopback.
REGISTRY = f"""
import http.server
class Refuse(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(401 if "secret" in self.path else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
    do_GET = do_HEAD
http.server.ThreadingHTTPServer(("127.0.0.1", {PORT}), Refuse).serve_forever()
"""
SLEEPS = ["python3", "-c", "import time; time.sleep(3600)"]
# containerd begins to watch a container's memory after it has started it, and reports "Error" if that is too late.
HOARDS = "import time; time.sleep(5); bytearray(10**9)"
SEGFAULT = "python3 -c 'import os; os.kill(os.getpid(), 11)'; exit $?"


def python(line: str) -> dict[str, Any]:
    return {"command": ["python3", "-c", line]}


def pulls(image: str) -> dict[str, Any]:
    return {"image": image, "imagePullPolicy": "Always"}


# Each case: fields of the pod's container, fields of its spec, and what the record must say. Pods that will soon be
# gone come first.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "evicted": ({}, {}, "Preemption", "EvictionByEvictionAPI"),
    "deleted": ({}, {}, "Infrastructure", "PodDeleted"),
    "raises": (python("{}['label']"), {}, "UserError", "UserError"),
    "misused": (python("raise SystemExit(2)"), {}, "UserError", "UserError"),
    "not-found-by-shell": ({"command": ["sh", "-c", "torchrum"]}, {}, "UserError", "CannotStart"),
    "no-such-program": ({"command": ["train"]}, {}, "UserError", "CannotStart"),
    "no-program": ({"command": ["/usr"]}, {}, "UserError", "CannotStart"),
    "no-directory": ({"workingDir": "/etc/passwd"}, {}, "UserError", "CannotStart"),
    "crashes": ({"command": ["sh", "-c", SEGFAULT]}, {}, "Unknown", "Crashed"),
    "too-large": (
        python(HOARDS) | {"resources": {"limits": {"memory": "64Mi"}}},
        {},
        "OutOfMemory",
        "OOMKilled",
    ),
    "as-root": ({}, {"securityContext": {"runAsNonRoot": True}}, "UserError", "RootImage"),
    "no-secret": (
        {"envFrom": [{"secretRef": {"name": "none"}}]},
        {},
        "UserError",
        "CreateContainerConfigError",
    ),
    "never-pulled": ({"image": "none:1"}, {}, "UserError", "ErrImageNeverPull"),
    "no-name": (pulls("No Image"), {}, "UserError", "InvalidImageName"),
    "no-image": (pulls(f"127.0.0.1:{PORT}/none:1"), {}, "UserError", "ImageNotFound"),
    "secret-image": (pulls(f"127.0.0.1:{PORT}/secret:1"), {}, "UserError", "ImagePullDenied"),
    "no-registry": (pulls("127.0.0.1:1/none:1"), {}, "Infrastructure", "ImagePullFailed"),
    "no-room": ({"resources": {"requests": {"cpu": "400"}}}, {"nodeName": NODE}, "Infrastructure", "OutOfcpu"),
    "wrong-node": ({}, {"nodeName": NODE, "nodeSelector": {"none": "none"}}, "Infrastructure", "NodeAffinity"),
}


@pytest.fixture(scope="module")
def workers(cluster: Cluster, python_image: Image) -> Iterator[str]:
    """A namespace with a pod for every case, and the registry on their node."""
    if not cluster.owns_nodes:
        pytest.skip("about the nodes that the tests start themselves; this cluster is somebody else's")
    with fresh_namespace(cluster.api, {}) as namespace:
        registry = worker("registry", cluster.nodes[0], python_image, python(REGISTRY), {"hostNetwork": True})
        pods.create(cluster, namespace, registry)
        pods.wait_ready(cluster, namespace, pod_name("registry"))
        for name, (container, spec, _, _) in CASES.items():
            pods.create(cluster, namespace, worker(name, cluster.nodes[0], python_image, container, spec))
        pods.wait_ready(cluster, namespace, pod_name("evicted"), pod_name("deleted"))
        evict(cluster, namespace, pod_name("evicted"))
        cluster.api.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{pod_name('deleted')}")
        yield namespace


def pod_name(job: str) -> str:
    return HOST.pod_name(job)


def worker(job: str, node: str, image: Image, container: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Host 0 of its own gang, on `node`. It stops slowly, so that its deletion can be watched."""
    trainer = {
        "name": "trainer",
        "image": image.name,
        "imagePullPolicy": "Never",
        "command": SLEEPS,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    body = {
        "restartPolicy": "Never",
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 30,
        "automountServiceAccountToken": False,
        "containers": [trainer | container],
    }
    if spec.get("nodeName") == NODE:
        spec = spec | {"nodeName": node}
    metadata = {"name": pod_name(job), "labels": worker_labels(job, HOST)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body | spec}


def evict(cluster: Cluster, namespace: str, name: str) -> None:
    metadata = {"name": name, "namespace": namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    cluster.api.call("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)


def failure(cluster: Cluster, namespace: str, job: str) -> Failure | None:
    body = pods.get(cluster, namespace, pod_name(job))
    assert body is not None
    return first_failure([WorkerPod(body)], 1, datetime.now(UTC) + PATIENCE, settle_user_errors=False)


@pytest.mark.parametrize("name", CASES)
def test_a_failed_pod_is_classified_by_what_happened_to_it(cluster: Cluster, workers: str, name: str) -> None:
    *_, failure_class, reason = CASES[name]

    def told() -> bool:
        found = failure(cluster, workers, name)
        return found is not None and (found.failure_class, found.reason) == (failure_class, reason)

    wait_until(told, timeout=END_SECONDS, what=f"{name} is {failure_class} {reason}")


def test_a_worker_ended_by_a_restart_of_its_host_counts_as_a_host_failure(
    cluster: Cluster, workers: str, python_image: Image
) -> None:
    node, restarted = cluster.nodes[:2]
    on_it = {"nodeSelector": {"kubernetes.io/hostname": restarted}}
    pods.create(cluster, workers, worker("restarted", node, python_image, {}, on_it))
    pods.wait_ready(cluster, workers, pod_name("restarted"))
    cluster.kill_host(restarted)
    cluster.start_host(restarted)
    wait_until(lambda: failure(cluster, workers, "restarted") is not None, timeout=END_SECONDS, what="it has failed")
    found = failure(cluster, workers, "restarted")
    assert (found.failure_class, found.reason) == ("Infrastructure", "ContainerStatusUnknown")


def test_the_message_of_a_loop_that_raises_is_its_traceback(cluster: Cluster, workers: str) -> None:
    wait_until(lambda: failure(cluster, workers, "raises") is not None, timeout=END_SECONDS, what="it has failed")
    found = failure(cluster, workers, "raises")
    assert found.message.endswith("KeyError: 'label'")
