"""JobSet beside the operator, as its release installs it: definition, role and webhooks in the cluster, the controller
in a process. All are of one version, which tests/cluster/go/jobset pins, and built or read from its Go module.

The controller runs only in its own turns, because it watches every pod. It takes part without its internal certificates
and its metrics: the cluster's own keys serve the webhooks.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import binaries
from tests.cluster.api import answers_ok
from tests.cluster.control_plane import ControlPlane
from tests.cluster.ports import LOOPBACK, free_port

VERSION = binaries.BINARIES["jobset"].version
_MODULE = "sigs.k8s.io/jobset"
_NAMESPACE = "jobset-system"
_DEFINITION = "jobsets.jobset.x-k8s.io"
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


class JobSetController:
    """Raises ToolchainMissing or BuildError where JobSet cannot be had."""

    def __init__(self, cluster: ControlPlane) -> None:
        self._program = binaries.ensure("jobset")["jobset"]
        components = binaries.module_folder("jobset", _MODULE) / "config" / "components"
        self._cluster = cluster
        self._webhooks, self._health = free_port(), free_port()
        # Too large for the annotation that a client-side apply writes.
        crd = components / "crd" / "bases" / "jobset.x-k8s.io_jobsets.yaml"
        cluster.kubectl("apply", "--server-side", "-f", str(crd))
        cluster.wait_established(_DEFINITION)
        cluster.kubectl("create", "namespace", _NAMESPACE)
        cluster.kubectl("create", "serviceaccount", "jobset", f"--namespace={_NAMESPACE}")
        cluster.kubectl("apply", "-f", str(components / "rbac" / "role.yaml"))
        cluster.kubectl(
            *("create", "clusterrolebinding", "jobset", "--clusterrole=manager-role"),
            f"--serviceaccount={_NAMESPACE}:jobset",
        )
        hooks = yaml.safe_dump_all(self._admission(components / "webhook"))
        with self.running():
            cluster.kubectl("apply", "-f", "-", input=hooks)

    @contextmanager
    def running(self) -> Iterator[None]:
        cluster = self._cluster
        keys = cluster.directory / "jobset"
        keys.mkdir(exist_ok=True)
        for name in ("crt", "key"):
            (keys / f"tls.{name}").write_bytes((cluster.directory / f"serving.{name}").read_bytes())
        health = f"{LOOPBACK}:{self._health}"
        config = keys / "config.json"
        config.write_text(json.dumps(_configuration(self._webhooks, health, keys)))
        account = cluster.service_account_kubeconfig(_NAMESPACE, "jobset")
        child = cluster.children.start("jobset", self._program, f"--config={config}", f"--kubeconfig={account}")
        try:
            child.wait_ready(lambda: answers_ok(f"http://{health}/readyz"), timeout=_START_SECONDS)
            yield
        finally:
            cluster.children.stop("jobset", grace=_STOP_SECONDS)

    def _admission(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Yields the webhooks of the release, at the address of the process. Its patches limit those for pods to pods
        of JobSets."""
        authority = base64.b64encode(self._cluster.ca_file.read_bytes()).decode()
        patches = [yaml.safe_load(path.read_text())[0]["value"] for path in sorted((folder / "patches").iterdir())]
        patched = {patch["name"]: patch for patch in patches}
        for configuration in yaml.safe_load_all((folder / "manifests.yaml").read_text()):
            configuration["webhooks"] = [patched.get(hook["name"], hook) for hook in configuration["webhooks"]]
            for hook in configuration["webhooks"]:
                url = f"https://{LOOPBACK}:{self._webhooks}{hook['clientConfig']['service']['path']}"
                hook["clientConfig"] = {"url": url, "caBundle": authority}
            yield configuration


def _configuration(port: int, health: str, keys: Path) -> dict[str, Any]:
    return {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": LOOPBACK, "port": port, "certDir": str(keys)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": health},
    }
