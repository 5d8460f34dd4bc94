"""What is wrong with a cluster that tests share, as a sentence; None if nothing is."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from tests.cluster import namespaces
from tests.cluster.api import ApiClient, ApiError, Object
from tests.cluster.deadlines import deadline
from tests.cluster.processes import wait_until

# What a busy machine needs for a moment may take this long.
PATIENCE_SECONDS = 30.0
SIMULATED = {"kwok.x-k8s.io/node": "fake"}
"""The annotation of the nodes that kwok plays."""
# A namespace is gone when its pods have stopped, which is not awaited.
DELETION_SECONDS = 120.0


def lasting(find: Callable[[], str | None]) -> str | None:
    """Returns what `find` still says when patience has ended."""
    said: list[str | None] = []

    def is_well() -> bool:
        try:
            said.append(find())
        except (OSError, ApiError) as error:
            said.append(f"the API server answers {error!r}")
        return said[-1] is None

    try:
        wait_until(is_well, timeout=PATIENCE_SECONDS, what="the cluster is healthy")
    except TimeoutError:
        return said[-1]
    return None


def unready_node(api: ApiClient, names: Iterable[str]) -> str | None:
    return next((f"{name} is not Ready" for name in names if not is_ready(api, name)), None)


def is_ready(api: ApiClient, name: str) -> bool:
    """Ready and not cordoned, and the controller manager has removed its taints for a lost or new node."""
    try:
        node = api.call("GET", f"/api/v1/nodes/{name}")
    except ApiError:
        return False
    tainted = any(taint["key"].startswith("node.kubernetes.io/") for taint in node["spec"].get("taints", []))
    return not tainted and ready_condition(node).get("status") == "True"


def heartbeat(api: ApiClient, name: str) -> str:
    """When the node's kubelet last reported, to the second."""
    return str(ready_condition(api.call("GET", f"/api/v1/nodes/{name}"))["lastHeartbeatTime"])


def ready_condition(node: Object) -> Object:
    """Empty for a node that has not reported yet."""
    conditions = node["status"].get("conditions", [])
    return next((condition for condition in conditions if condition["type"] == "Ready"), {})


def unavailable_deployment(api: ApiClient) -> str | None:
    """Of those that no test owns: the operator's, and the cluster's own."""
    for item in api.call("GET", "/apis/apps/v1/deployments")["items"]:
        name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
        ready = item.get("status", {}).get("availableReplicas", 0)
        if ready < item["spec"]["replicas"] and not namespace.startswith(namespaces.PREFIX):
            return f"{ready} of {item['spec']['replicas']} pods of deployment {namespace}/{name} are available"
    return None


def left_over_node(api: ApiClient) -> str | None:
    """A simulated one, where pods of the next test could land."""
    for item in api.call("GET", "/api/v1/nodes")["items"]:
        if SIMULATED.items() <= item["metadata"].get("annotations", {}).items():
            return f"node {item['metadata']['name']} is left over"
    return None


def left_over_namespace(api: ApiClient) -> str | None:
    """One that a test has left behind, or that cannot be deleted."""
    now = datetime.now(UTC)
    for item in api.call("GET", "/api/v1/namespaces")["items"]:
        name = item["metadata"]["name"]
        if not name.startswith(namespaces.PREFIX) or name in namespaces.in_use:
            continue
        told = item["metadata"].get("deletionTimestamp")
        if told is None:
            return f"namespace {name} is left over"
        age = (now - datetime.fromisoformat(told)).total_seconds()
        if age > deadline(DELETION_SECONDS):
            return f"namespace {name} is being deleted for {age:.0f} s"
    return None
