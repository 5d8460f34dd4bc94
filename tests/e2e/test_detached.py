"""`python -m tests.cluster up` and `down`: an interactive cluster, which outlives the command that started it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import binaries, directories

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def cache() -> Iterator[Path]:
    """A cache folder for this test that has the programs, so that it does not touch a developer's cluster.

    It is not in `tmp_path`, where the path of containerd's socket would be too long.
    """
    programs = directories.cache_root() / "binaries"
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / directories.cache_root().name
        own.mkdir()
        (own / "binaries").symlink_to(programs)
        yield Path(folder)
        command(Path(folder), "down")


def command(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.cluster", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_cluster_stays_up_until_it_is_taken_down(cache: Path) -> None:
    kubectl = binaries.ensure("kubectl")["kubectl"]
    up = command(cache, "up", "--nodes", "1")
    assert up.returncode == 0, up.stderr
    variable, _, kubeconfig = up.stdout.strip().removeprefix("export ").partition("=")
    assert variable == "KUBECONFIG"
    nodes = [str(kubectl), f"--kubeconfig={kubeconfig}", "get", "nodes", "--output=name"]
    assert subprocess.check_output(nodes, text=True) == "node/node-0\n"
    again = command(cache, "up")
    assert (again.returncode, "`down` takes it down" in again.stderr) == (1, True)
    assert command(cache, "down").returncode == 0
    assert not Path(kubeconfig).exists()


def test_taking_down_a_cluster_that_is_not_up_succeeds(cache: Path) -> None:
    assert command(cache, "down").returncode == 0


@pytest.mark.parametrize("nodes", ["0", "101", "two"])
def test_an_impossible_number_of_nodes_is_refused(tmp_path: Path, nodes: str) -> None:
    refused = command(tmp_path, "up", "--nodes", nodes)
    assert refused.returncode == 2
    assert f"--nodes: {nodes} is not a number" in refused.stderr
