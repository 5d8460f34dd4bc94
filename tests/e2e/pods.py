"""Pods for the tests of this folder: the `restricted` level admits them, and they run a line of Python."""

from collections.abc import Callable
from typing import Any

from tests.cluster.api import ApiError, Object
from tests.cluster.cluster import Cluster
from tests.cluster.images import Image
from tests.cluster.processes import wait_until

PORT = 8080
READY_SECONDS = 60.0

# Answers every request with the pod's name, logs that name once, and ends at SIGTERM.
ANSWERS_ITS_NAME = f"""
import http.server, os, signal, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["HOSTNAME"].encode())
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
print("this is", os.environ["HOSTNAME"], flush=True)
http.server.HTTPServer(("", {PORT}), Answer).serve_forever()
"""


def restricted_pod(name: str, image: Image, *, node: str | None = None, **spec: Any) -> Object:
    """A pod that serves its name at PORT, as non-root without capabilities; `spec`: additional fields of its spec.

    node: where it must run; by default the scheduler's choice. Its host name in the Service `peers` is the pod's name.
    """
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "peers"}},
        "spec": {
            "hostname": name,
            "subdomain": "peers",
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 5,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": image.name,
                    "imagePullPolicy": "Never",
                    "command": ["python3", "-c", ANSWERS_ITS_NAME],
                    "readinessProbe": {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            **({"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}),
            **spec,
        },
    }


def create(cluster: Cluster, namespace: str, pod: Object) -> None:
    """Raises ApiError."""
    cluster.api.call("POST", f"/api/v1/namespaces/{namespace}/pods", pod)


def get(cluster: Cluster, namespace: str, name: str) -> Object | None:
    """The pod, or None if it does not exist."""
    try:
        return cluster.api.call("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def condition(item: Object | None, kind: str) -> Object:
    """A condition of a pod or node; empty if it has no such condition."""
    conditions = item["status"].get("conditions", []) if item else []
    return next((found for found in conditions if found["type"] == kind), {})


def wait_ready(cluster: Cluster, namespace: str, *names: str) -> None:
    for name in names:
        wait_until(
            lambda name=name: condition(get(cluster, namespace, name), "Ready").get("status") == "True",
            timeout=READY_SECONDS,
            what=f"pod {name} is Ready",
        )


def ended_with(code: int, reason: str = "Error") -> Callable[[Object], bool]:
    """Whether the kubelet reports this about a pod's container."""

    def has_struck(pod: Object) -> bool:
        states = [status["state"] for status in pod["status"].get("containerStatuses", [])]
        ends = [state["terminated"] for state in states if "terminated" in state]
        return any((end["exitCode"], end["reason"]) == (code, reason) for end in ends)

    return has_struck
