"""The control groups of a cluster's nodes: one folder for the cluster with one for each node's kubelet in it.

Kubelets that share a root delete each other's pods, so each gets its own root. Works with cgroup v1 (a hierarchy for
each controller) and v2 (one for all).
"""

import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.deadlines import deadline

REMOVE_SECONDS = 10.0
POLL_SECONDS = 0.05
_COUNTS_AS = 6


class CgroupsInUse(Exception):
    """Processes still run in the groups; the message names them."""


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup file system. `v2`: its type is cgroup2, where a parent hands controllers to its children."""

    root: Path
    v2: bool


def hierarchies(mountinfo: str) -> list[Hierarchy]:
    """Reads the text of /proc/self/mountinfo (proc_pid_mountinfo(5)): the type stands after the lone hyphen."""
    found = []
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        kind = source.split()[0]
        if kind in ("cgroup", "cgroup2"):
            found.append(Hierarchy(Path(mount.split()[4]), kind == "cgroup2"))
    return found


def cluster_group(cluster_directory: Path) -> str:
    return f"tpu-training-operator-{cluster_directory.name}"


def create(group: str) -> None:
    """Makes the group, for example "cluster/node-0", in every hierarchy, with everything that its parent may use."""
    for hierarchy in _mounted():
        folder = hierarchy.root
        for depth, name in enumerate(Path(group).parts):
            if hierarchy.v2:
                _hand_down(folder)
            folder = folder / name
            folder.mkdir(exist_ok=True)
            if depth == 0:
                _weigh(folder)
            if not hierarchy.v2:
                _inherit_cpuset(folder)


def limit_memory(group: str, most_bytes: int, pid: int) -> None:
    """Moves a process into the group, where the kernel kills it if it uses more memory than this."""
    for hierarchy in _mounted():
        limit = hierarchy.root / group / ("memory.max" if hierarchy.v2 else "memory.limit_in_bytes")
        if limit.exists():
            limit.write_text(str(most_bytes))
            (limit.parent / "cgroup.procs").write_text(str(pid))


def limit_cpu(group: str, share: float) -> Path:
    """Lets the processes of the group run for no more than this part of one CPU's time, in turns of half a second.
    Returns the file that takes the processes: what is written to it moves there."""
    period = 500_000
    quota = int(share * period)
    for hierarchy in _mounted():
        folder = hierarchy.root / group
        if hierarchy.v2 and (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota} {period}")
            return folder / "cgroup.procs"
        if (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_period_us").write_text(str(period))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            return folder / "cgroup.procs"
    raise FileNotFoundError("no mounted hierarchy limits CPUs")


def remove(group: str) -> None:
    """Removes the group and its subgroups once killed processes have left them. Raises CgroupsInUse."""
    started = time.monotonic()
    for hierarchy in _mounted():
        while not _removed(hierarchy.root / group):
            if time.monotonic() - started > deadline(REMOVE_SECONDS):
                raise CgroupsInUse(f"processes {_processes(hierarchy.root / group)} are still in {group}")
            time.sleep(POLL_SECONDS)


def _mounted() -> list[Hierarchy]:
    return hierarchies(Path("/proc/self/mountinfo").read_text())


def _hand_down(folder: Path) -> None:
    """v2: the children of `folder` get each controller that it has itself."""
    controllers = (folder / "cgroup.controllers").read_text().split()
    if controllers:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))


def _weigh(folder: Path) -> None:
    """All containers of a cluster compete as one with every single process outside of it: while other tests run, four
    workers would share the time of one. So the group counts as many."""
    for name, of_one in (("cpu.shares", 1024), ("cpu.weight", 100)):
        if (folder / name).exists():
            (folder / name).write_text(str(_COUNTS_AS * of_one))


def _inherit_cpuset(folder: Path) -> None:
    """v1: a new cpuset is empty, and no process may enter it before it has CPUs and memory nodes."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = folder / name
        if file.exists() and not file.read_text().strip():
            file.write_text((folder.parent / name).read_text())


def _removed(folder: Path) -> bool:
    """Tries to remove the folder and its subfolders, deepest first; returns whether it succeeded."""
    if not folder.exists():
        return True
    for path in sorted((folder, *(path for path in folder.rglob("*") if path.is_dir())), reverse=True):
        try:
            path.rmdir()
        except OSError:
            return False
    return True


def _processes(folder: Path) -> list[int]:
    return sorted({int(pid) for file in folder.rglob("cgroup.procs") for pid in file.read_text().split()})
