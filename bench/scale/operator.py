"""The operator as the chart ships it: the chart's objects in the cluster, its container's arguments in a process."""

import json
import re
import time
import urllib.request
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.chart.helm import Helm, container, of_kind, pod
from tests.cluster import binaries
from tests.cluster.api import answers_ok
from tests.cluster.control_plane import ControlPlane
from tests.cluster.pod_process import mount_account, operator_command
from tests.cluster.ports import LOOPBACK, free_port

NAMESPACE = "tpu-system"
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_CLOCK_TICKS = 100
_QUEUE_SECONDS = "workqueue_queue_duration_seconds_bucket"


class Operator:
    """One operator for the whole cluster. `user`: its name in the API server's audit log."""

    def __init__(self, cluster: ControlPlane) -> None:
        self._cluster = cluster
        objects = Helm(binaries.ensure("helm")["helm"], cluster.directory).template(apis=())
        shipped = [item for item in objects if item["kind"] != "Deployment"]
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(shipped))
        for definition in of_kind(objects, "CustomResourceDefinition"):
            cluster.wait_established(definition["metadata"]["name"])
        account = pod(objects)["spec"]["serviceAccountName"]
        self._arguments: list[str] = container(objects)["args"]
        kubeconfig = json.loads(cluster.service_account_kubeconfig(NAMESPACE, account).read_text())
        self._account = cluster.directory / "operator.account"
        mount_account(self._account, kubeconfig["users"][0]["user"]["token"], cluster.ca_file)
        self._ports: dict[str, int] = {}
        self.user = f"system:serviceaccount:{NAMESPACE}:{account}"

    def start(self) -> float:
        """Returns when it answers its health probe; how many seconds that took."""
        began = time.monotonic()
        arguments = [re.sub(r"^--(\w+)-port=\d+$", self._on_free_port, each) for each in self._arguments]
        self._child = self._cluster.children.start(
            "operator",
            Path("/usr/bin/env"),
            *operator_command(self._cluster.server, self._account, *arguments),
        )
        healthy = f"http://{LOOPBACK}:{self._ports['health']}/healthz"
        self._child.wait_ready(lambda: answers_ok(healthy), timeout=_START_SECONDS)
        return time.monotonic() - began

    def stop(self) -> None:
        self._cluster.children.stop("operator", grace=_STOP_SECONDS)

    def _on_free_port(self, found: re.Match[str]) -> str:
        self._ports[found[1]] = free_port()
        return f"--{found[1]}-port={self._ports[found[1]]}"

    @property
    def cpu_seconds(self) -> float:
        """Of the whole process, in user and kernel mode: proc_pid_stat(5)."""
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

    @property
    def rss_mib(self) -> float:
        return self._memory("VmRSS")

    @property
    def peak_mib(self) -> float:
        return self._memory("VmHWM")

    def _memory(self, name: str) -> float:
        lines = Path(f"/proc/{self._child.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

    def passes(self) -> int:
        """Counts the passes over jobs that have ended."""
        return int(sum(self._series("controller_runtime_reconcile_total").values()))

    def is_idle(self) -> bool:
        busy = ("workqueue_depth", "controller_runtime_active_workers")
        return not any(value for name in busy for value in self._series(name).values())

    def waits(self) -> dict[str, float]:
        """Counts the jobs that waited in the queue, by the upper bound of how many seconds they did, cumulated."""
        return self._series(_QUEUE_SECONDS, "le")

    def _series(self, name: str, label: str = "") -> dict[str, float]:
        url = f"http://{LOOPBACK}:{self._ports['metrics']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {
            sample.labels.get(label, str(index)): sample.value
            for index, sample in enumerate(samples)
            if sample.name == name
        }
