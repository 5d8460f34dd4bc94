"""What the end-to-end tests ask of a cluster, and the clusters that offer it."""

import os
import subprocess
from pathlib import Path
from typing import Protocol

from tests.cluster.api import ApiClient

SETTING = "TEST_CLUSTER"
KUBECONFIG_SETTING = "TEST_KUBECONFIG"
"""Not KUBECONFIG: the tests install, label and delete, and must not do so where a shell happens to point at."""


class Cluster(Protocol):
    """owns_nodes: whether tests may hurt its nodes; what follows that line here is offered only then.

    directory: for files, including the logs of its programs. api: raw calls as admin, for polling.
    """

    owns_nodes: bool
    nodes: tuple[str, ...]
    kubeconfig: Path
    directory: Path
    api: ApiClient

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def problem(self) -> str | None:
        """Why no test should run in it, see `Shared`."""

    def wait_schedulable(self) -> None:
        """Returns when every node takes pods."""

    def kubectl(self, *args: str, input: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:  # noqa: A002
        """Runs kubectl as admin. With `check`, raises KubectlError when it ends with an error."""

    def helm(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Runs helm as admin. Raises HelmError."""

    def make_tpu_node(self, name: str, accelerator: str, topology: str, chips: int, pool: str) -> None:
        """Labels, taints and equips a node like a TPU host on GKE; this survives a restart of its kubelet."""

    def make_plain_node(self, name: str) -> None:
        """Undoes `make_tpu_node`."""

    # Only where `owns_nodes`.

    address: str
    """This machine, as nodes and pods see it."""

    def load_image(self, archive: Path) -> None:
        """Imports an archive into every node. Pods that use it need imagePullPolicy: Never."""

    def running_containers(self, name: str) -> set[str]:
        """The ids of the containers that run on the node, including pods' sandboxes."""

    def restart_apiserver(self) -> None:
        """Returns when it is ready."""

    def stop_kubelet(self, name: str) -> None:
        """The control plane loses the node; its pods keep running."""

    def start_kubelet(self, name: str) -> None:
        """Returns when the node is Ready again."""

    def kill_host(self, name: str) -> None:
        """Pulls the node's plug: kubelet, containerd and all its containers end at once and report nothing."""

    def start_host(self, name: str) -> None:
        """Starts a killed host, which still has its images but no running pods. Returns when it is Ready."""


KINDS = ("own", "kind")


def chosen(nodes: int, shared: tuple[Path, ...], directory: Path) -> Cluster:
    """Returns the cluster that the environment asks for, not started. `directory` is for TEST_KUBECONFIG's."""
    from tests.cluster.existing import ExistingCluster

    if kubeconfig := os.environ.get(KUBECONFIG_SETTING):
        return ExistingCluster(Path(kubeconfig), directory)
    return make(os.environ.get(SETTING, "own"), nodes, shared)


def make(kind: str, nodes: int, shared: tuple[Path, ...]) -> Cluster:
    """Returns a cluster of one of KINDS, not started. Raises ValueError."""
    from tests.cluster.kind import KindCluster
    from tests.cluster.nodes import RealCluster

    if kind not in KINDS:
        raise ValueError(f"{SETTING} is {kind!r}; {' and '.join(KINDS)} are known")
    return KindCluster(nodes, shared) if kind == "kind" else RealCluster(nodes, shared)
