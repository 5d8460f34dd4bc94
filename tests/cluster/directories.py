"""Where a test cluster keeps its files, and what becomes of the directory of a run that was killed.

Called by `control_plane`, `nodes`, `images`, `binaries` and `__main__`. Each cluster has a directory of its own under
`clusters_root()`, with the record of the process that owns it. The next run removes directories whose owner is
gone, and stops what still runs from them. A process is stopped only if its pid file describes it exactly: a foreign
process with a recycled pid is left alone.
"""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import cgroups, network
from tests.cluster.processes import ProcessRecord, start_ticks

OWNER_FILE = "owner"


def cache_root() -> Path:
    """This project's folder in the user's cache (XDG Base Directory Specification, XDG_CACHE_HOME)."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "tpu-training-operator"


def clusters_root() -> Path:
    return cache_root() / "clusters"


@contextmanager
def locked(path: Path, *, waiting: str = "") -> Iterator[None]:
    """Holds an exclusive lock on the file `path`; a killed holder's lock is released by the kernel.

    `waiting`: what to say on stderr when another process holds the lock.
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
    # Under one lock, so that no other run sees a directory whose owner is not written yet and sweeps it.
    with locked(root / "lock"):
        _sweep(root)
        directory = Path(tempfile.mkdtemp(dir=root))
        ProcessRecord.own().write(directory / OWNER_FILE)
    return directory


def remove_cluster_directory(directory: Path) -> None:
    """With what the cluster's nodes have on the machine outside of it; its processes have been stopped before."""
    cgroups.remove(cgroups.cluster_group(directory))
    network.remove(network.bridge_name(directory))
    shutil.rmtree(directory, ignore_errors=True)


def sweep() -> None:
    """Removes what killed runs left."""
    root = clusters_root()
    with locked(root / "lock"):
        _sweep(root)


def _sweep(root: Path) -> None:
    for directory in root.iterdir():
        if not directory.is_dir():
            continue
        owner = ProcessRecord.read(directory / OWNER_FILE)
        # Looser than is_running(): a test runner may rewrite its command line; in doubt its cluster stays.
        if owner is None or start_ticks(owner.pid) != owner.start_ticks:
            _stop_left_over(directory)
            remove_cluster_directory(directory)


def _stop_left_over(directory: Path) -> None:
    for pid_file in directory.glob("*.pid"):
        record = ProcessRecord.read(pid_file)
        if record is not None:
            record.kill()
