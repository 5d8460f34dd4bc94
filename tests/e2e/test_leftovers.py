"""A cluster ends with the process that started it, however that ends, and the next run removes its last traces."""

import signal
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture
def killed(cluster: RealCluster) -> Iterator[tuple[Path, set[int]]]:
    """The directory and the former processes of a second cluster whose run was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_A_CLUSTER], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        directory = Path(run.stdout.readline().strip())
        processes = _processes_of(directory)
        assert len(processes) > 5
        run.send_signal(signal.SIGKILL)
    yield directory, processes
    directories.sweep()


def test_no_process_outlives_a_killed_run(killed: tuple[Path, set[int]]) -> None:
    _, processes = killed
    wait_until(lambda: not any(start_ticks(pid) for pid in processes), timeout=30, what="all processes have ended")


def test_a_sweep_removes_bridge_control_groups_and_files(killed: tuple[Path, set[int]]) -> None:
    directory, _ = killed
    bridge = Path("/sys/class/net", network.bridge_name(directory))
    groups = list(Path("/sys/fs/cgroup").glob(f"**/{cgroups.cluster_group(directory)}"))
    assert bridge.exists()
    assert groups
    directories.sweep()
    assert not any(path.exists() for path in (bridge, directory, *groups))


def test_a_second_cluster_and_its_sweep_leave_the_first_alone(
    cluster: RealCluster, killed: tuple[Path, set[int]]
) -> None:
    directories.sweep()
    assert cluster.kubectl("get", "nodes", "--no-headers").stdout.split().count("Ready") == len(cluster.nodes)
    assert Path("/sys/class/net", network.bridge_name(cluster.directory)).exists()


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
