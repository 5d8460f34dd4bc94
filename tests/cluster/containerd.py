"""containerd inside a node's machine, and how images get into it.

Its data is in the node's directory. Its state is in the machine's own /run and disappears with the machine.
"""

import json
import subprocess
from pathlib import Path

from tests.cluster import network, packages
from tests.cluster.machine import Machine
from tests.cluster.network import Network
from tests.cluster.processes import Child, launched

START_SECONDS = 30.0

# containerd opens a second socket beside its first, whose name ends like this.
TTRPC = ".ttrpc"
SOCKET_PATH_LIMIT = 107  # unix(7): sun_path, without the terminating NUL

# The containerd namespace that the CRI plugin, and so kubelet, sees.
KUBERNETES_NAMESPACE = "k8s.io"

# containerd 1.x reads version 2, and 2.x migrates it. restrict_oom_score_adj lets pods start where this process, itself
# in a container, may not lower an OOM score below its own.
CONFIG = """\
version = 2
root = "{data}"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox_image}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_folder}"
    conf_dir = "{cni_config}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{base_spec}"
"""


def bind_mounts(shared: tuple[Path, ...]) -> list[dict[str, object]]:
    """Entries of an OCI runtime specification that show a container these folders, read-only."""
    return [
        {"destination": str(path), "source": str(path), "type": "bind", "options": ["rbind", "ro"]} for path in shared
    ]


class ImportRefused(Exception):
    """containerd refused an image archive; the message holds its output."""


class Containerd:
    """The containerd of one node; `directory` is the node's."""

    def __init__(self, machine: Machine, directory: Path) -> None:
        self._machine = machine
        self._directory = directory
        self._config = directory / "containerd.toml"
        self.socket = directory / "containerd.sock"

    def configure(self, nodes: Network, index: int, sandbox_image: str, shared: tuple[Path, ...]) -> None:
        """`shared`: folders of this machine that every container sees read-only at the same path, because they are too
        large to copy into an image."""
        """Raises MachineUnfit when the directory's path is too long for a socket."""
        if len(f"{self.socket}{TTRPC}") > SOCKET_PATH_LIMIT:
            raise packages.MachineUnfit(
                f"{self.socket} is too long a path for a socket; set XDG_CACHE_HOME to a folder with a shorter one"
            )
        cni_config = self._directory / "cni"
        cni_config.mkdir(parents=True)
        (cni_config / "pods.conflist").write_text(json.dumps(network.pod_network(nodes, index)))
        self._config.write_text(
            CONFIG.format(
                data=self._directory / "containerd",
                socket=self.socket,
                sandbox_image=sandbox_image,
                cni_folder=packages.cni_folder(),
                cni_config=cni_config,
                base_spec=self._base_spec(shared),
            )
        )

    def _base_spec(self, shared: tuple[Path, ...]) -> Path:
        """containerd's own default for a container, plus the shared folders."""
        command = (str(packages.find("ctr")), "oci", "spec")
        spec = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        spec["mounts"] += bind_mounts(shared)
        path = self._directory / "base-spec.json"
        path.write_text(json.dumps(spec))
        return path

    def start(self) -> Child:
        """Does not wait: see `answers`."""
        return self._machine.run(
            f"containerd-{self._machine.name}", packages.find("containerd"), f"--config={self._config}"
        )

    def answers(self) -> bool:
        return self._ctr("version").returncode == 0

    def load(self, archive: Path) -> None:
        """Imports an OCI archive under the name that it contains. Raises ImportRefused."""
        done = self._ctr("images", "import", str(archive))
        if done.returncode != 0:
            raise ImportRefused(f"{archive}: {done.stderr.strip()}")

    def running(self) -> set[str]:
        """The ids of the running containers; a pod has one more, which holds its namespaces."""
        done = self._ctr("tasks", "list")
        rows = [line.split() for line in done.stdout.splitlines()[1:]]
        return {name for name, _pid, status in rows if status == "RUNNING"}

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = (str(packages.find("ctr")), f"--address={self.socket}", f"--namespace={KUBERNETES_NAMESPACE}")
        return subprocess.run(launched((*command, *arguments)), capture_output=True, text=True, check=False)
