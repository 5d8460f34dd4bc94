"""A cluster that a test breaks fails that test's file and no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import packages
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import add_cpu_nodes, cpu_nodes_for, start_kwok
from tests.cluster.namespaces import emptied_namespace, fresh_namespace
from tests.cluster.nodes import RealCluster
from tests.cluster.processes import ProcessRecord, wait_until
from tests.cluster.shared import REBUILT, Shared

REPOSITORY = Path(__file__).parents[3]
CONFTEST = """
import pytest
from tests.cluster.shared import Shared
from tests.conftest import pytest_runtest_makereport

class Cluster:
    def __init__(self):
        self.trouble = None
        self.installed = []

    def start(self):
        pass

    def stop(self):
        pass

    def problem(self):
        return self.trouble

@pytest.fixture(scope="package")
def shared():
    with Shared(Cluster) as shared:
        yield shared

@pytest.fixture(scope="module")
def cluster(shared):
    return shared.healthy()

@pytest.fixture(scope="module")
def chart(cluster, shared):
    shared.once("a chart", lambda: cluster.installed.append("chart"))
"""
BREAKS = """
def test_breaks_it(cluster, chart):
    cluster.trouble = "etcd ended"
    assert cluster.installed == []
"""
LEAVES_TRACES = """
import pytest

@pytest.fixture
def half(cluster):
    yield
    cluster.installed.remove("not there")

def test_leaves_traces(cluster, chart, half):
    pass
"""
USES = """
def test_uses_it(cluster, chart):
    assert cluster.installed == ["chart"]
"""

POD = {"metadata": {"name": "left"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}


def kill(directory: Path, name: str) -> None:
    record = ProcessRecord.read(directory / f"{name}.pid")
    record.kill()


def test_the_next_file_gets_a_new_cluster_with_everything_installed(tmp_path: Path) -> None:
    files = {"conftest": CONFTEST, "test_a": BREAKS, "test_b": USES, "test_c": LEAVES_TRACES, "test_d": USES}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    settings = (f"--rootdir={tmp_path}", f"--override-ini=pythonpath={REPOSITORY}", "--import-mode=importlib")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *settings, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "1 failed, 3 passed, 2 warnings, 1 error" in done.stdout, done.stdout
    assert done.stdout.count(f"{REBUILT}: etcd ended") == 1
    assert done.stdout.count(f"{REBUILT}: the teardown of test_c.py::test_leaves_traces failed") == 1


class Breakable:
    """Starts at the given try, and then has the given problem."""

    def __init__(self, log: list[str], failures: list[str]) -> None:
        self.trouble: str | None = None
        self._log = log
        self._failures = failures

    def start(self) -> None:
        if self._failures:
            raise TimeoutError(self._failures.pop())
        self._log.append("started")

    def stop(self) -> None:
        self._log.append("stopped")

    def problem(self) -> str | None:
        return self.trouble


def test_a_slow_start_is_tried_again() -> None:
    log: list[str] = []
    failures = ["node-1 is not ready"]
    with Shared(lambda: Breakable(log, failures)) as shared:
        with pytest.warns(RuntimeWarning, match=f"{REBUILT}: it did not start: node-1 is not ready"):
            shared.healthy()
        assert shared.healthy() is shared.healthy()
    assert log == ["started", "stopped"]


def test_what_failed_half_way_is_not_continued_but_begun_again() -> None:
    log: list[str] = []

    def install() -> str:
        raise TimeoutError("helm was slow")

    with Shared(lambda: Breakable(log, [])) as shared:
        shared.healthy()
        with pytest.raises(TimeoutError):
            shared.once("the operator", install)
        with pytest.warns(RuntimeWarning, match=f"{REBUILT}: the operator failed: helm was slow"):
            shared.healthy()
        assert shared.once("the operator", lambda: "installed") == "installed"
    assert log[:3] == ["started", "stopped", "started"]


def test_what_is_left_over_is_a_problem_and_what_is_in_use_is_none() -> None:
    with Shared(ControlPlane) as shared:
        cluster = shared.healthy()
        with fresh_namespace(cluster.api):
            assert cluster.problem() is None
        with emptied_namespace(cluster.api) as kept:
            cluster.api.call("POST", f"/api/v1/namespaces/{kept}/pods", POD)
        assert cluster.problem() is None
        assert cluster.api.call("GET", f"/api/v1/namespaces/{kept}/pods")["items"] == []
        cluster.kubectl("create", "namespace", "test-forgotten")
        assert cluster.problem() == "namespace test-forgotten is left over"
        cluster.kubectl("delete", "namespace", "test-forgotten", "--wait=false")
        assert cluster.problem() is None

        start_kwok(cluster)
        with pytest.raises(RuntimeError), cpu_nodes_for(cluster, 1):
            raise RuntimeError
        assert cluster.problem() is None
        pool = add_cpu_nodes(cluster, 1)
        assert cluster.problem() == f"node {pool.nodes[0]} is left over"

        kill(cluster.directory, "etcd")
        wait_until(lambda: cluster.problem() == "etcd ended", timeout=10, what="etcd is missed")
        with pytest.warns(RuntimeWarning, match=f"{REBUILT}: etcd ended"):
            assert shared.healthy().problem() is None
        assert not cluster.directory.exists()


@pytest.mark.skipif(packages.missing() is not None, reason=packages.missing() or "")
def test_whatever_of_a_node_ends_is_noticed() -> None:
    with RealCluster(nodes=1) as cluster:
        assert cluster.problem() is None
        for victim in ("kubelet-node-0", "containerd-node-0"):
            kill(cluster.directory, victim)
            wait_until(lambda: victim in (cluster.problem() or ""), timeout=10, what=f"{victim} is missed")  # noqa: B023
    assert not cluster.directory.exists()
