"""A real Kubernetes cluster on this machine without Docker: control plane, real nodes, DNS.

`with RealCluster(nodes=2) as cluster: ...` needs root and Linux (see `packages`).
"""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

from tests.cluster import binaries, cgroups, directories, dns, health, network, oci, packages
from tests.cluster.api import ApiClient
from tests.cluster.control_plane import START_SECONDS, ControlPlane
from tests.cluster.kubelet import NodeSettings
from tests.cluster.network import Network
from tests.cluster.node import READY_SECONDS, RealNode
from tests.cluster.processes import wait_until
from tests.cluster.tpu_node import TpuHost, mark_tpu_host, unmark_tpu_host

SANDBOX_IMAGE = "tpu-operator.dev/pause:1"
PROXY_USER = "system:kube-proxy"

# A node whose lease is this old is lost. Kubernetes waits 50 s; the tests of lost hosts need not wait that long.
NODE_GRACE_SECONDS = 10
CONTROLLER_MANAGER_FLAGS = ("--node-monitor-period=1s", f"--node-monitor-grace-period={NODE_GRACE_SECONDS}s")


class HelmError(Exception):
    """helm ended with an error; the message holds the command and what it said."""


class RealCluster:
    """start() returns when all nodes are Ready and pods have DNS and Services.

    nodes: the names, "node-0" and so on. shared: folders of this machine that every container sees read-only.
    address: this machine's address for nodes and pods.
    """

    owns_nodes = True

    def __init__(self, nodes: int = 2, shared: tuple[Path, ...] = ()) -> None:
        if not 1 <= nodes <= network.MAX_NODES:
            raise ValueError(f"nodes: {nodes}; a cluster has 1 to {network.MAX_NODES}")
        self.nodes = tuple(f"node-{index}" for index in range(nodes))
        self._shared = shared
        self.address: str
        self.control_plane: ControlPlane
        self._by_name: dict[str, RealNode] = {}
        self._tpu_hosts: dict[str, TpuHost] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def api(self) -> ApiClient:
        """Raw API calls as admin, for polling."""
        return self.control_plane.api

    @property
    def directory(self) -> Path:
        """The cluster's files, including the logs of its programs; stop() removes it."""
        return self.control_plane.directory

    @property
    def kubeconfig(self) -> Path:
        """The admin's kubeconfig."""
        return self.control_plane.kubeconfig

    def kubectl(
        self,
        *args: str,
        input: str | None = None,  # noqa: A002 - named as in subprocess.run
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as admin. With `check`, raises KubectlError when it ends with an error."""
        return self.control_plane.kubectl(*args, input=input, check=check)

    def helm(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Runs helm as admin, with this cluster's own settings and caches. Raises HelmError."""
        return run_helm(self.kubeconfig, self.directory / "helm", *args)

    def start(self) -> None:
        """Raises MachineUnfit, ToolchainMissing or BuildError before anything runs, then NetworkError, ProcessError."""
        packages.require()
        programs = binaries.ensure(*binaries.CONTROL_PLANE_PROGRAMS, *binaries.NODE_PROGRAMS)
        directory = directories.create_cluster_directory()
        try:
            with directories.locked(directories.clusters_root() / "network.lock"):
                nodes_network = network.create(network.bridge_name(directory))
            self.address = str(nodes_network.machine)
            self._start_control_plane(directory, self.address)
        except BaseException:
            directories.remove_cluster_directory(directory)
            raise
        try:
            self._start_nodes(nodes_network, programs)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for node in self._by_name.values():
            node.machine.kill()
        self.control_plane.stop()

    def problem(self) -> str | None:
        """Why no test should run here, if so."""
        if self._tpu_hosts:
            return f"{', '.join(self._tpu_hosts)} still poses as a TPU host"
        ended = (node.machine.problem for node in self._by_name.values())
        return self.control_plane.problem() or next(filter(None, ended), None) or health.lasting(self._unready)

    def wait_schedulable(self) -> None:
        """Returns when every node takes pods. Raises TimeoutError."""
        wait_until(
            lambda: health.unready_node(self.api, self.nodes) is None, timeout=READY_SECONDS, what="all nodes are Ready"
        )

    def _unready(self) -> str | None:
        return health.unready_node(self.api, self.nodes) or health.unavailable_deployment(self.api)

    def load_image(self, archive: Path) -> None:
        """Imports an archive into every node. Pods that use it need imagePullPolicy: Never."""
        with ThreadPoolExecutor(len(self._by_name)) as together:
            list(together.map(lambda node: node.containerd.load(archive), self._by_name.values()))

    def make_tpu_node(self, name: str, accelerator: str, topology: str, chips: int, pool: str) -> None:
        """Labels, taints and equips a node like a TPU host on GKE; this survives a restart of its kubelet.

        accelerator, topology: the values of the labels gke-tpu-accelerator and gke-tpu-topology. chips:
        google.com/tpu. pool: the node pool's name; the hosts of one slice share it.
        """
        self._tpu_hosts[name] = TpuHost(name, accelerator, topology, chips, pool)
        mark_tpu_host(self.api, self._tpu_hosts[name])

    def make_plain_node(self, name: str) -> None:
        """Undoes `make_tpu_node`."""
        del self._tpu_hosts[name]
        unmark_tpu_host(self.api, name)

    def running_containers(self, name: str) -> set[str]:
        """The ids of the containers that run on the node, including pods' sandboxes."""
        return self._by_name[name].containerd.running()

    def stop_kubelet(self, name: str) -> None:
        """The control plane loses the node; its pods keep running."""
        self._by_name[name].stop_kubelet()

    def start_kubelet(self, name: str) -> None:
        """Returns when the node is Ready again."""
        last = health.heartbeat(self.api, name)
        self._by_name[name].start_kubelet()
        self._wait_until_back(name, last)

    def kill_host(self, name: str) -> None:
        """Pulls the node's plug: kubelet, containerd and all its containers end at once and report nothing."""
        self._by_name[name].machine.kill()

    def start_host(self, name: str) -> None:
        """Starts a killed host, which still has its images but no running pods. Returns when it is Ready."""
        last = health.heartbeat(self.api, name)
        node = self._by_name[name]
        node.wait_for_containerd(node.start_machine())
        node.start_kubernetes()
        self._wait_until_back(name, last)

    def restart_apiserver(self) -> None:
        """Returns when it is ready."""
        self.control_plane.restart_apiserver()

    def _start_control_plane(self, directory: Path, address: str) -> None:
        nodes = {_user(name): "system:nodes" for name in self.nodes}
        self.control_plane = ControlPlane(
            directory=directory,
            address=address,
            users={PROXY_USER: "", dns.USER: "system:masters", **nodes},
            controller_manager_flags=CONTROLLER_MANAGER_FLAGS,
        )
        self.control_plane.start()

    def _start_nodes(self, nodes_network: Network, programs: dict[str, Path]) -> None:
        address = str(nodes_network.machine)
        coredns = dns.start_dns(self.control_plane, address)
        archive = self.directory / "pause.tar"
        oci.write_program_image(archive, SANDBOX_IMAGE, programs["pause"])
        for index, name in enumerate(self.nodes):
            self._by_name[name] = self._node(nodes_network, index, programs)
        starting = [(node, node.start_machine()) for node in self._by_name.values()]
        for node, containerd in starting:
            node.wait_for_containerd(containerd)
            node.start_kubernetes()
            node.containerd.load(archive)
        coredns.wait_ready(lambda: dns.answers(address), timeout=START_SECONDS)
        for name, node in self._by_name.items():
            node.wait_ready(partial(health.is_ready, self.api, name))

    def _node(self, nodes_network: Network, index: int, programs: dict[str, Path]) -> RealNode:
        cluster, name = self.control_plane, self.nodes[index]
        directory = cluster.directory / name
        directory.mkdir()
        cgroup = f"{cgroups.cluster_group(cluster.directory)}/{name}"
        cgroups.create(cgroup)
        settings = NodeSettings(
            name=name,
            address=nodes_network.node(index),
            directory=directory,
            cgroup=cgroup,
            dns=nodes_network.machine,
            pods=nodes_network.subnet,
            containerd_socket=directory / "containerd.sock",
            kubelet_credentials=cluster.user_kubeconfig(_user(name)),
            proxy_credentials=cluster.user_kubeconfig(PROXY_USER),
        )
        place = (nodes_network, index, len(self.nodes))
        return RealNode(cluster.children, programs, settings, place, SANDBOX_IMAGE, self._shared)

    def _wait_until_back(self, name: str, last: str) -> None:
        """`last`: the old kubelet's last heartbeat, which may still say Ready."""
        api = self.api
        self._by_name[name].wait_ready(lambda: health.is_ready(api, name) and health.heartbeat(api, name) != last)
        if name in self._tpu_hosts:
            mark_tpu_host(self.api, self._tpu_hosts[name])


def run_helm(kubeconfig: Path, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs helm with its settings and caches in `home`. Raises HelmError."""
    program = binaries.ensure("helm")["helm"]
    environment = {"PATH": os.defpath, "HOME": str(home), "KUBECONFIG": str(kubeconfig)}
    done = subprocess.run([str(program), *args], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HelmError(f"helm {' '.join(args)}: {done.stderr.strip()}")
    return done


def _user(node: str) -> str:
    """The identity that the node authorizer accepts as the kubelet of `node`."""
    return f"system:node:{node}"
