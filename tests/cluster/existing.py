"""An existing cluster, from kind for example, for the end-to-end tests: `TEST_KUBECONFIG=path make test`.

It offers what `cluster.Cluster` lists, except what only the owner of the nodes can do.
"""

import json
import os
import subprocess
from base64 import b64decode
from pathlib import Path

from tests.cluster import binaries, health
from tests.cluster.api import ApiClient
from tests.cluster.control_plane import KubectlError
from tests.cluster.node import READY_SECONDS
from tests.cluster.nodes import run_helm
from tests.cluster.processes import wait_until
from tests.cluster.tpu_node import TpuHost, mark_tpu_host, unmark_tpu_host

# The tests' own calls need a bearer token; kubeconfigs hold certificates as often.
_ACCOUNT = "tpu-training-operator-tests"


class ExistingCluster:
    """start() makes an account with all rights for the tests' own calls; stop() removes it."""

    owns_nodes = False

    def __init__(self, kubeconfig: Path, directory: Path) -> None:
        self.kubeconfig = kubeconfig
        self.directory = directory
        self._kubectl = binaries.ensure("kubectl")["kubectl"]
        self.nodes: tuple[str, ...] = ()
        self._tpu_hosts: dict[str, TpuHost] = {}
        self.api: ApiClient

    def __enter__(self) -> "ExistingCluster":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.kubectl("create", "serviceaccount", _ACCOUNT, "--namespace=kube-system")
        account = f"--serviceaccount=kube-system:{_ACCOUNT}"
        self.kubectl("create", "clusterrolebinding", _ACCOUNT, "--clusterrole=cluster-admin", account)
        token = self.kubectl("create", "token", _ACCOUNT, "--namespace=kube-system", "--duration=4h").stdout.strip()
        view = json.loads(self.kubectl("config", "view", "--raw", "--minify", "--output=json").stdout)
        server = view["clusters"][0]["cluster"]
        self.api = ApiClient(server["server"], self._ca_file(server), token)
        self.nodes = tuple(self.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").stdout.split())

    def stop(self) -> None:
        self.api.close()
        self.kubectl("delete", "clusterrolebinding", _ACCOUNT)
        self.kubectl("delete", "serviceaccount", _ACCOUNT, "--namespace=kube-system")

    def problem(self) -> str | None:
        """None: these tests could not mend it, because it is somebody else's."""
        return None

    def wait_schedulable(self) -> None:
        """See RealCluster."""
        wait_until(
            lambda: health.unready_node(self.api, self.nodes) is None, timeout=READY_SECONDS, what="all nodes are Ready"
        )

    def kubectl(
        self,
        *args: str,
        input: str | None = None,  # noqa: A002 - named as in subprocess.run
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as the kubeconfig's user. With `check`, raises KubectlError when it ends with an error."""
        environment = os.environ | {"KUBECONFIG": str(self.kubeconfig), "KUBERC": "off"}
        command = [str(self._kubectl), *args]
        done = subprocess.run(command, input=input, env=environment, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done

    def helm(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Raises HelmError."""
        return run_helm(self.kubeconfig, self.directory / "helm", *args)

    def make_tpu_node(self, name: str, accelerator: str, topology: str, chips: int, pool: str) -> None:
        """See RealCluster."""
        self._tpu_hosts[name] = TpuHost(name, accelerator, topology, chips, pool)
        mark_tpu_host(self.api, self._tpu_hosts[name])

    def make_plain_node(self, name: str) -> None:
        """See RealCluster."""
        del self._tpu_hosts[name]
        unmark_tpu_host(self.api, name)

    def _ca_file(self, server: dict[str, str]) -> Path:
        if "certificate-authority" in server:
            return Path(server["certificate-authority"])
        path = self.directory / "ca.crt"
        path.write_bytes(b64decode(server["certificate-authority-data"]))
        return path
