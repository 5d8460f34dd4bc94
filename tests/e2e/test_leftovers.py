"""A cluster ends with the process that started it, however that ends, and the next run removes its last traces."""

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import cgroups, directories, network
from tests.cluster.nodes import RealCluster
from tests.cluster.processes import start_ticks, wait_until

REPOSITORY = Path(__file__).parents[2]
HOLD_A_CLUSTER = """
import sys
from tests.cluster.nodes import RealCluster
with RealCluster(nodes=1) as cluster:
    print(cluster.directory, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Killed:
    """A second cluster whose run was killed: its former processes, and what else of it was there before a sweep."""

    processes: set[int]
    traces: list[Path]
    outlived: bool


@pytest.fixture(scope="module")
def killed(cluster: RealCluster) -> Killed:
    """One such cluster serves all tests, because its start takes ten seconds of CPU time; it is swept away at once."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_A_CLUSTER], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        directory = Path(run.stdout.readline().strip())
        processes = _processes_of(directory)
        run.send_signal(signal.SIGKILL)
    try:
        outlived = not _have_ended(processes)
        groups = Path("/sys/fs/cgroup").glob(f"**/{cgroups.cluster_group(directory)}")
        traces = [directory, Path("/sys/class/net", network.bridge_name(directory)), *groups]
        return Killed(processes, [path for path in traces if path.exists()], outlived)
    finally:
        directories.sweep()


def test_no_process_outlives_a_killed_run(killed: Killed) -> None:
    assert len(killed.processes) > 5
    assert not killed.outlived


def test_a_sweep_removes_bridge_control_groups_and_files(killed: Killed) -> None:
    assert len(killed.traces) >= 3
    assert not any(path.exists() for path in killed.traces)


def test_a_second_cluster_and_its_sweep_leave_the_first_alone(cluster: RealCluster, killed: Killed) -> None:
    cluster.wait_schedulable()
    assert Path("/sys/class/net", network.bridge_name(cluster.directory)).exists()


def _have_ended(processes: set[int]) -> bool:
    """Waits for it."""
    try:
        wait_until(lambda: not any(start_ticks(pid) for pid in processes), timeout=30, what="all processes have ended")
    except TimeoutError:
        return False
    return True


def _processes_of(directory: Path) -> set[int]:
    """The processes whose command line names the directory, those inside the nodes included."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory).encode() in file.read_bytes():
                found.add(int(file.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found
