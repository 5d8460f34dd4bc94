"""The operator as its own process, with only a service account's credentials."""

import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import yaml

from tests.cluster.api import answers_ok
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import deadline
from tests.cluster.namespaces import emptied_namespace
from tests.cluster.pod_process import mount_account
from tests.cluster.ports import LOOPBACK, free_port
from tests.controlplane.forked_operator import start_operator

_RBAC = Path(__file__).with_name("rbac.yaml")
ACCOUNT = "tpu-training-operator"


class OperatorProcess:
    """One operator. Its log goes to the cluster's directory.

    namespace: of its account. everywhere: it serves all namespaces, not only this one. server: where its requests go,
    if not to the API server itself.
    """

    def __init__(
        self,
        cluster: ControlPlane,
        namespace: str,
        name: str = "operator",
        *arguments: str,
        everywhere: bool = False,
        server: str = "",
    ) -> None:
        self.namespace = namespace
        self._cluster = cluster
        self._name = f"{name}-{namespace}"
        self._arguments = arguments if everywhere else ("--namespace", namespace, *arguments)
        grant(cluster, namespace, everywhere=everywhere)
        self._server = server or cluster.server
        self._account = cluster.directory / f"{self._name}.account"
        mount_account(self._account, cluster.service_account_token(namespace, ACCOUNT), cluster.ca_file)
        self._health = ""

    def start(self) -> None:
        """Returns when the operator answers its health probe."""
        port = free_port()
        self._health = f"http://{LOOPBACK}:{port}/healthz"
        arguments = ("--health-port", str(port), *self._arguments)
        child = self._cluster.children.adopt(
            self._name, partial(start_operator, self._server, self._account, arguments)
        )
        child.wait_ready(lambda: answers_ok(self._health), timeout=60)
        self._child = child

    def stop(self) -> None:
        self._cluster.children.stop(self._name, grace=30)

    def kill(self) -> None:
        """Kills it like a lost node or the OOM killer, without a chance to clean up."""
        self._child._process.send_signal(signal.SIGKILL)
        self._cluster.children.stop(self._name, grace=5)

    def health(self) -> str:
        with urllib.request.urlopen(self._health, timeout=deadline(10)) as answer:
            return str(answer.read().decode())

    def log(self) -> str:
        return self._child.log.read_text()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        code: int | None = self._child._process.poll()
        return code

    @property
    def works(self) -> bool:
        """Whether it leads, where several operators share a Lease."""
        return "longestStandstillSeconds" in self.health()


@contextmanager
def serving_everywhere(cluster: ControlPlane) -> Iterator[OperatorProcess]:
    """An operator for all namespaces, which tests of one module share: each start takes a second of CPU time."""
    with emptied_namespace(cluster.api) as home:
        process = OperatorProcess(cluster, home, "operator", everywhere=True)
        process.start()
        yield process
        if process.exit_code is None:
            process.stop()


def grant(cluster: ControlPlane, namespace: str, *, everywhere: bool = False) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": namespace}}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding" if everywhere else "RoleBinding",
        "metadata": {"name": f"{ACCOUNT}-{namespace}"} if everywhere else {"name": ACCOUNT, "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
    }
    cluster.kubectl("apply", "-f", str(_RBAC))
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all([account, binding]))
