"""The chart in a real cluster as a user with helm and kubectl sees it, and the operator that it would run there."""

import json
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.chart.helm import FULL_NAME, NAMESPACE, RELEASE, REPOSITORY, Helm, Object, container
from tests.cluster.api import answers_ok
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import deadline
from tests.cluster.ports import LOOPBACK, free_port

GROUP, JOBS = "tpu-operator.dev", "tputrainingjobs"
DEFINITION = f"crd/{JOBS}.{GROUP}"
SECOND = "second"


class Cluster:
    """The control plane as a user with helm and kubectl sees it."""

    def __init__(self, plane: ControlPlane, helm: Helm) -> None:
        self.plane = plane
        self._helm = helm
        self._kubeconfig = f"--kubeconfig={plane.kubeconfig}"
        self._installed: set[str] = set()

    def helm(self, command: str, *arguments: str, values: Object | None = None, release: str = RELEASE) -> str:
        place = ("--namespace", NAMESPACE, self._kubeconfig)
        if command == "install":
            self._installed.add(release)
        return self._helm.run(command, release, *arguments, *place, values=values)

    def clear(self) -> None:
        """Without the chart and its jobs.

        The definition stays for the next installation, which adopts it, unless another release has it: to serve a new
        one takes the API server half a second of CPU time.
        """
        for release in self._installed:
            self.helm("uninstall", "--ignore-not-found", release=release)
        if SECOND in self._installed:
            self.kubectl("delete", DEFINITION, "--ignore-not-found")
        elif self.has_definition():
            self.kubectl("delete", DEFINITION.removeprefix("crd/"), "--all", "--all-namespaces")

    def kubectl(self, *arguments: str, **options: str) -> str:
        return self.plane.kubectl(*arguments, **options).stdout.strip()

    def may(self, user: str, verb: str, resource: str, namespace: str, subresource: str = "") -> bool:
        # `kubectl auth can-i` for one who may ask about others; tests ask often.
        group = GROUP if resource == JOBS else ""
        asked = {"verb": verb, "group": group, "resource": resource, "namespace": namespace, "subresource": subresource}
        question = {"spec": {"user": user, "resourceAttributes": asked}}
        answer = self.plane.api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", question)
        return bool(answer["status"]["allowed"])

    def has_definition(self) -> bool:
        return self.kubectl("get", DEFINITION, "--ignore-not-found", "--output=name") != ""

    def deployed_arguments(self) -> list[str]:
        found = self.kubectl("get", f"deployment/{FULL_NAME}", "--namespace", NAMESPACE, "--output=json")
        return list(container([json.loads(found)])["args"])


def apply_job(cluster: Cluster, namespace: str) -> None:
    cluster.plane.wait_established(DEFINITION.removeprefix("crd/"))
    example = REPOSITORY / "examples" / "digits.yaml"
    cluster.kubectl("apply", f"--filename={example}", f"--namespace={namespace}")


@dataclass(frozen=True)
class Operator:
    """The operator's process, and its ports on loopback."""

    name: str
    health_port: int
    progress_port: int
    metrics_port: int

    @property
    def is_healthy(self) -> bool:
        return answers_ok(f"http://{LOOPBACK}:{self.health_port}/healthz")

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self.metrics_port}/metrics", timeout=deadline(60)) as answer:
            return str(answer.read(), "utf-8")


def start_operator(cluster: Cluster, packages: Path | None = None) -> Operator:
    """The operator as the installed Deployment would run it, but on this machine; returns when it is healthy.

    packages: a folder with another operator than this one.
    """
    operator = Operator("operator", free_port(), free_port(), free_port())
    kubeconfig = cluster.plane.service_account_kubeconfig(NAMESPACE, FULL_NAME)
    child = cluster.plane.children.start(
        operator.name,
        Path("/usr/bin/env"),
        f"KUBECONFIG={kubeconfig}",
        *([f"PYTHONPATH={packages}"] if packages else []),
        *(sys.executable, "-m", "tpu_training_operator", *cluster.deployed_arguments()),
        # The last flag wins; the pod's ports may be in use on this machine.
        f"--health-port={operator.health_port}",
        f"--progress-port={operator.progress_port}",
        f"--metrics-port={operator.metrics_port}",
    )
    child.wait_ready(lambda: operator.is_healthy, timeout=60)
    return operator
