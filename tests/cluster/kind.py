"""The same cluster made by kind, for machines with Docker or Podman: `TEST_CLUSTER=kind`, `make kind-up`.

kind calls a node a container, so a host is killed by killing one. Its nodes get what `nodes.RealCluster` gives its own:
short heartbeats, the shared folders in every container, and TPU hosts on request.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import yaml

from tests.cluster import directories, health, toolchain
from tests.cluster.api import Object
from tests.cluster.containerd import bind_mounts
from tests.cluster.deadlines import deadline
from tests.cluster.existing import ExistingCluster
from tests.cluster.kubelet import CRASH_LOOP_SECONDS, LEASE_SECONDS
from tests.cluster.node import READY_SECONDS
from tests.cluster.nodes import CONTROLLER_MANAGER_FLAGS
from tests.cluster.processes import wait_until
from tests.cluster.tpu_node import mark_tpu_host

NAME = "tpu-training-operator-tests"
IMAGE_SETTING = "TEST_KIND_IMAGE"
"""Names the node image where kind's own cannot be pulled."""
BASE_SPEC = "/etc/containerd/cri-base.json"
CONTROLLER_MANAGER = "/etc/kubernetes/manifests/kube-controller-manager.yaml"
START_SECONDS = 300.0


class KindError(Exception):
    """kind, or the container engine below it, ended with an error; the message holds the command and what it said."""


def engine() -> str:
    """The program that runs kind's containers, as kind itself chooses it. Raises ToolchainMissing."""
    chosen = os.environ.get("KIND_EXPERIMENTAL_PROVIDER")
    names = (chosen,) if chosen else ("docker", "podman", "nerdctl")
    found = next((path for name in names if (path := shutil.which(name))), None)
    return found or toolchain.find(names[0], purpose="run kind's nodes", install="Docker or Podman")


class KindCluster(ExistingCluster):
    """start() replaces a cluster of this name, which a killed run may have left.

    nodes: so many workers beside kind's control plane, where no pod goes. shared: see `RealCluster`.
    """

    owns_nodes = True

    def __init__(self, nodes: int = 2, shared: tuple[Path, ...] = (), name: str = NAME) -> None:
        directory = directories.create_cluster_directory()
        super().__init__(directory / "kubeconfig", directory)
        self._name = name
        self._count = nodes
        self._shared = shared
        self._kind = toolchain.find("kind", purpose="make a cluster of containers", install="kind")
        self._engine = engine()

    @property
    def address(self) -> str:
        """This machine, as the nodes and pods see it."""
        return self._in(self.nodes[0], "ip", "route", "show", "default").split()[2]

    def start(self) -> None:
        """Raises KindError."""
        delete(self._name)
        config = self.directory / "kind.json"
        config.write_text(json.dumps(configuration(self._count, self._shared)))
        where = (f"--name={self._name}", f"--kubeconfig={self.kubeconfig}", f"--config={config}")
        image = [f"--image={named}"] if (named := os.environ.get(IMAGE_SETTING)) else []
        try:
            _run(self._kind, "create", "cluster", *where, *image, f"--wait={deadline(START_SECONDS):.0f}s")
            super().start()
            self.nodes = tuple(name for name in self.nodes if not name.endswith("-control-plane"))
            self._shorten_the_patience_for_nodes()
            for node in self.nodes:
                self._share(node)
            wait_until(lambda: self._unready() is None, timeout=START_SECONDS, what="kind's nodes and pods are ready")
        except BaseException:
            self._remove()
            raise

    def stop(self) -> None:
        self.api.close()
        self._remove()

    def problem(self) -> str | None:
        """Why no test should run here, if so."""
        if self._tpu_hosts:
            return f"{', '.join(self._tpu_hosts)} still poses as a TPU host"
        return health.lasting(self._unready) or health.left_over_namespace(self.api)

    def load_image(self, archive: Path) -> None:
        """See RealCluster."""
        nodes = f"--nodes={','.join(self.nodes)}"
        _run(self._kind, "load", "image-archive", str(archive), f"--name={self._name}", nodes)

    def running_containers(self, name: str) -> set[str]:
        """See RealCluster."""
        rows = self._in(name, "ctr", "--namespace=k8s.io", "tasks", "list").splitlines()[1:]
        return {identity for identity, _pid, status in map(str.split, rows) if status == "RUNNING"}

    def stop_kubelet(self, name: str) -> None:
        """See RealCluster."""
        self._in(name, "systemctl", "stop", "kubelet")

    def start_kubelet(self, name: str) -> None:
        """See RealCluster."""
        last = health.heartbeat(self.api, name)
        self._in(name, "systemctl", "start", "kubelet")
        self._wait_until_back(name, last)

    def kill_host(self, name: str) -> None:
        """See RealCluster."""
        _run(self._engine, "kill", name)

    def start_host(self, name: str) -> None:
        """See RealCluster."""
        last = health.heartbeat(self.api, name)
        _run(self._engine, "start", name)
        self._wait_until_back(name, last)

    def restart_apiserver(self) -> None:
        """Returns when it is ready."""
        host = f"{self._name}-control-plane"
        # Its kubelet starts another.
        self._in(host, "pkill", "--exact", "kube-apiserver")
        wait_until(
            lambda: self.kubectl("get", "--raw=/readyz", check=False).returncode == 0,
            timeout=READY_SECONDS,
            what="the API server is ready again",
        )

    def _unready(self) -> str | None:
        return health.unready_node(self.api, self.nodes) or health.unavailable_deployment(self.api)

    def _wait_until_back(self, name: str, last: str) -> None:
        wait_until(
            lambda: health.is_ready(self.api, name) and health.heartbeat(self.api, name) != last,
            timeout=READY_SECONDS,
            what=f"{name} is Ready again",
        )
        if name in self._tpu_hosts:
            mark_tpu_host(self.api, self._tpu_hosts[name])

    def _shorten_the_patience_for_nodes(self) -> None:
        """Changes the flags where kubeadm has written them: its own settings change their form with its version."""
        flags = "".join(rf"\n    - {flag}" for flag in CONTROLLER_MANAGER_FLAGS)
        edit = f"s|^    - kube-controller-manager$|&{flags}|"
        self._in(f"{self._name}-control-plane", "sed", "--in-place", edit, CONTROLLER_MANAGER)

    def _share(self, node: str) -> None:
        """Adds the folders to what every container of the node mounts."""
        mounts = json.dumps(bind_mounts(self._shared))
        script = f'jq --argjson more "$1" ".mounts += \\$more" {BASE_SPEC} > /tmp/base && mv /tmp/base {BASE_SPEC}'
        self._in(node, "sh", "-ec", f"{script} && systemctl restart containerd", "share", mounts)

    def _in(self, node: str, *command: str) -> str:
        return _run(self._engine, "exec", node, *command)

    def _remove(self) -> None:
        delete(self._name)
        directories.remove_cluster_directory(self.directory)


def configuration(nodes: int, shared: tuple[Path, ...]) -> Object:
    """kind's own, https://kind.sigs.k8s.io/docs/user/configuration/."""
    kubelet = {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "failCgroupV1": False,
        "nodeLeaseDurationSeconds": LEASE_SECONDS,
        "nodeStatusUpdateFrequency": "2s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": f"{CRASH_LOOP_SECONDS}s"},
    }
    mounts = [{"hostPath": str(path), "containerPath": str(path), "readOnly": True} for path in shared]
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "kubeadmConfigPatches": [yaml.safe_dump(kubelet)],
        "nodes": [{"role": "control-plane"}, *({"role": "worker", "extraMounts": mounts} for _ in range(nodes))],
    }


def delete(name: str) -> None:
    """Does nothing if there is none. Raises KindError."""
    _run(toolchain.find("kind", purpose="remove a cluster", install="kind"), "delete", "cluster", f"--name={name}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KindError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
