"""A namespace of the real cluster, seen as a user sees it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.namespaces import fresh_namespace

REPOSITORY = Path(__file__).parents[2]

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}

JOBS = "tputrainingjobs"
# Where the API serves what is not of its core.
GROUPS = {JOBS: "apis/tpu-operator.dev/v1alpha1", "endpointslices": "apis/discovery.k8s.io/v1"}

# Of a waiting job. Each pod costs the nodes and the control plane most of a CPU-second.
HOSTS = 2

# A worker that runs until it is told to stop, and then ends like a preempted trainer.
WAITS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); time.sleep(3600)"


class Space:
    """One namespace."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def kubectl(self, *args: str, **options: Any) -> str:
        return self.cluster.kubectl("--namespace", self.name, *args, **options).stdout

    def objects(self, kind: str) -> list[Object]:
        """`kind`: the plural, as in the API's paths. Tests poll this; kubectl would cost a process each time."""
        found: list[Object] = self.cluster.api.call("GET", _path(kind, self.name))["items"]
        return found

    def names(self, kind: str) -> list[str]:
        return [item["metadata"]["name"] for item in self.objects(kind)]

    def pods(self) -> list[Object]:
        return self.objects("pods")

    def uids(self) -> dict[str, str]:
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.pods()}

    def waiting(self, name: str = "digits", **changes: Any) -> str:
        """The digits job on HOSTS hosts with workers that only wait."""
        job: Object = yaml.safe_load((REPOSITORY / "examples" / "digits.yaml").read_text())
        job["metadata"]["name"] = name
        job["spec"]["slice"]["acceleratorType"] = "v5litepod-8"
        del job["spec"]["trainer"]["entrypoint"]
        # By default TPU workers request most of a machine larger than this one.
        requests = {"cpu": "10m", "memory": "32Mi"}
        job["spec"]["trainer"] |= {
            "command": ["python3", "-c", WAITS],
            "terminationGracePeriodSeconds": 5,
            "resources": {"requests": requests},
        }
        job["spec"] |= changes
        return yaml.safe_dump(job)

    def apply_waiting(self, name: str = "digits", **changes: Any) -> None:
        self.kubectl("apply", "-f", "-", input=self.waiting(name, **changes))

    def wait_running(self, name: str = "digits") -> None:
        self.kubectl("wait", "--for=condition=GangReady", f"tpujob/{name}", kubectl_timeout(120))


@contextmanager
def a_space(cluster: Cluster) -> Iterator[Space]:
    """A new namespace at Pod Security level `restricted`."""
    with fresh_namespace(cluster.api, RESTRICTED) as name:
        space = Space(cluster, name)
        yield space
        space.kubectl("delete", "tpujob", "--all", "--wait=false")


def status(cluster: Cluster, name: str = "digits", namespace: str = "default") -> Object:
    """The status of a TPUTrainingJob."""
    read: Object = cluster.api.call("GET", f"{_path(JOBS, namespace)}/{name}")["status"]
    return read


def _path(kind: str, namespace: str) -> str:
    return f"/{GROUPS.get(kind, 'api/v1')}/namespaces/{namespace}/{kind}"
