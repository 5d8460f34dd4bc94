"""Where a test cluster keeps its files, and how the next run cleans up after one that was killed.

Each cluster has its own directory under `clusters_root()`, with the record of the process that owns it. The next run
removes directories whose owner is gone, and stops what still runs from them. It stops a process only if the pid file
describes it exactly: a foreign process with a recycled pid is left alone.
"""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import cgroups, network
from tests.cluster.processes import ProcessRecord, start_ticks

OWNER_FILE = "owner"
REMOVED = ".removed"


def cache_root() -> Path:
    """This project's folder in the user's cache (XDG Base Directory Specification, XDG_CACHE_HOME)."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "tpu-training-operator"


def clusters_root() -> Path:
    return cache_root() / "clusters"


@contextmanager
def locked(path: Path, *, waiting: str = "") -> Iterator[None]:
    """Holds an exclusive lock on the file `path`; a killed holder's lock is released by the kernel.

    `waiting`: the message for stderr when another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def create_cluster_directory() -> Path:
    """A new directory owned by this process, after sweeping old ones; mode 0700, it will hold credentials."""
    root = clusters_root()
    # Holding the lock keeps another run from sweeping a directory whose owner is not written yet.
    with locked(root / "lock"):
        _sweep(root)
        directory = Path(tempfile.mkdtemp(dir=root))
        ProcessRecord.own().write(directory / OWNER_FILE)
    return directory


def remove_cluster_directory(directory: Path) -> None:
    """Also removes what the cluster's nodes left elsewhere on the machine. Stop its processes first.

    The files are gone from this path at once; another process deletes them. Nodes leave 30000, and where a file system
    is mounted with `discard`, each one is waited for: two minutes in all. `_sweep` finds what a killed one has left.
    """
    cgroups.remove(cgroups.cluster_group(directory))
    network.remove(network.bridge_name(directory))
    if not directory.exists():
        return
    if directory.suffix != REMOVED:
        directory = directory.rename(directory.with_name(f"{directory.name}{REMOVED}"))
    nothing = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)]
    os.posix_spawn("/bin/rm", ("rm", "-rf", "--", str(directory)), os.environ, file_actions=nothing, setsid=True)


def sweep() -> None:
    """Removes what killed runs left behind."""
    root = clusters_root()
    with locked(root / "lock"):
        _sweep(root)


def _sweep(root: Path) -> None:
    for directory in root.iterdir():
        if not directory.is_dir():
            continue
        owner = ProcessRecord.read(directory / OWNER_FILE)
        # Looser than is_running(), because a test runner may rewrite its command line; when in doubt, keep its cluster.
        if owner is None or start_ticks(owner.pid) != owner.start_ticks:
            _stop_left_over(directory)
            remove_cluster_directory(directory)


def _stop_left_over(directory: Path) -> None:
    for pid_file in directory.glob("*.pid"):
        record = ProcessRecord.read(pid_file)
        if record is not None:
            record.kill()
