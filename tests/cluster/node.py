"""One real node: a machine with containerd, kubelet and kube-proxy that can be started, killed and started again."""

from collections.abc import Callable
from pathlib import Path

from tests.cluster import network
from tests.cluster.api import answers_ok
from tests.cluster.containerd import START_SECONDS, Containerd
from tests.cluster.kubelet import PROXY_HEALTH_PORT, NodeSettings, kubelet_flags, proxy_flags
from tests.cluster.machine import Machine
from tests.cluster.network import Network
from tests.cluster.processes import Child, Children

READY_SECONDS = 60.0
STOP_SECONDS = 10.0


class RealNode:
    """`index` of `count`: its place in the network. `programs`: paths of kubelet and kube-proxy."""

    def __init__(
        self,
        children: Children,
        programs: dict[str, Path],
        settings: NodeSettings,
        place: tuple[Network, int, int],
        sandbox_image: str,
        shared: tuple[Path, ...],
    ) -> None:
        self.name = settings.name
        self._kubelet: Child
        self._proxy: Child
        self._programs = programs
        self._settings = settings
        self._network, self._index, self._count = place
        self.machine = Machine(children, settings.directory, settings.name)
        self.containerd = Containerd(self.machine, settings.directory)
        self.containerd.configure(self._network, self._index, sandbox_image, shared)

    def start_machine(self) -> Child:
        """Starts the machine with its network, and containerd without waiting for it."""
        self.machine.start()
        network.connect(self._network, self._index, self._count, self.machine.pid)
        return self.containerd.start()

    def wait_for_containerd(self, child: Child) -> None:
        """Raises ProcessError."""
        child.wait_ready(self.containerd.answers, timeout=START_SECONDS)

    def start_kubernetes(self) -> None:
        """Starts kubelet and kube-proxy; see `wait_ready`."""
        self.start_kubelet()
        self._proxy = self.machine.run(
            f"kube-proxy-{self.name}", self._programs["kube-proxy"], *proxy_flags(self._settings)
        )

    def start_kubelet(self) -> None:
        self._kubelet = self.machine.run(
            f"kubelet-{self.name}", self._programs["kubelet"], *kubelet_flags(self._settings)
        )

    def stop_kubelet(self) -> None:
        """The pods keep running."""
        self.machine.stop(f"kubelet-{self.name}", grace=STOP_SECONDS)

    def wait_ready(self, is_ready: Callable[[], bool]) -> None:
        """Returns when the node `is_ready` according to the API server and knows the Services. Raises ProcessError."""
        self._kubelet.wait_ready(is_ready, timeout=READY_SECONDS)
        health = f"http://{self._settings.address}:{PROXY_HEALTH_PORT}/healthz"
        self._proxy.wait_ready(lambda: answers_ok(health), timeout=READY_SECONDS)
