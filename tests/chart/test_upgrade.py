"""From the last release to this chart and back, while gangs run: no pod is touched, no attempt begins, nothing is lost.

Both operators are the real ones: the released one from its own wheel, with the arguments and rights of its own chart.
Its dependencies are the present ones.
"""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chart.cluster import Cluster, Operator, start_operator
from tests.chart.helm import CHART
from tests.chart.switches import OTHER
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import cpu_nodes_for, start_kwok
from tests.cluster.processes import wait_until
from tests.controlplane.jobs import Namespace

Object = dict[str, Any]

RELEASED = Path(__file__).with_name("released")
# With what every version has known.
SPEC: Object = {
    "slice": {"acceleratorType": "v5litepod-16", "hardware": "CPU"},
    "trainer": {"image": "registry.example/digits:1", "entrypoint": "digits:task"},
    "recipe": {
        "tunedOn": {"acceleratorType": "v5litepod-4"},
        "globalBatchSize": 32,
        "trainSteps": 1200,
        "optimizer": {"name": "sgd", "learningRate": 0.05},
    },
    "runPolicy": {
        "restart": {
            "limits": [{"class": "Infrastructure", "max": 3}],
            "backoff": {"initialSeconds": 1, "maxSeconds": 1},
        }
    },
}
# With the namespace and, before 0.2.0, without it.
_RUNNING = re.compile(r'^tpujob_jobs\{.*state="Running"\} (\S+)$', re.MULTILINE)
JOBS = STEADY, UNLUCKY, PAUSED = ("steady", "unlucky", "paused")


@pytest.fixture(scope="module")
def old_operator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released packages, unpacked."""
    folder = tmp_path_factory.mktemp("released")
    [wheel] = RELEASED.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    asked = [sys.executable, "-c", "import tpu_training_operator as it; print(it.__file__)"]
    found = subprocess.run(asked, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(folder)), "the present operator would stand in for the released one"
    return folder


@pytest.fixture(scope="module")
def nodes(control_plane: ControlPlane) -> Iterator[None]:
    start_kwok(control_plane)
    with cpu_nodes_for(control_plane, 4):
        yield
    control_plane.children.stop("kwok", grace=30)


class Release:
    """The chart of one version, with the operator of that version."""

    def __init__(self, cluster: Cluster, packages: Path | None) -> None:
        self._cluster = cluster
        self._packages = packages
        self._operator: Operator

    def run(self) -> None:
        """Returns when the operator is healthy."""
        self._operator = start_operator(self._cluster, self._packages)

    def wait_until_it_knows(self, running: int) -> None:
        wait_until(
            lambda: sum(map(float, _RUNNING.findall(self._operator.metrics()))) == running,
            timeout=60,
            what=f"the operator counts {running} running jobs",
        )

    def stop(self) -> None:
        self._cluster.plane.children.stop(self._operator.name, grace=30)


def gangs(space: Namespace) -> Object:
    """What must not change: every pod, to the last write to it, and what the status says about attempts."""
    pods = {
        pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["metadata"]["resourceVersion"])
        for name in JOBS
        for pod in space.pods(name)
    }
    told = ("attempt", "state", "restarts", "startTime")
    return {"pods": pods, "statuses": {name: {key: space.status(name).get(key) for key in told} for name in JOBS}}


def specs(space: Namespace) -> Object:
    """As the API server serves them: a newer definition adds its defaults."""
    return {name: space.job(name)["spec"] for name in JOBS}


def contains(whole: Any, part: Any) -> bool:
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    return bool(whole == part)


def test_gangs_of_the_last_release_run_on_through_an_upgrade_and_a_rollback(
    cluster: Cluster, nodes: None, old_operator: Path
) -> None:
    space = Namespace(cluster.plane, OTHER)
    [archive] = RELEASED.glob("*.tgz")
    old, new = Release(cluster, old_operator), Release(cluster, None)

    cluster.helm("install", str(archive))
    cluster.plane.wait_established("tputrainingjobs.tpu-operator.dev")
    definition = stored_definition(cluster)
    old.run()
    for name, policy in ((STEADY, {}), (UNLUCKY, {}), (PAUSED, {"suspend": True})):
        spec = SPEC | {"runPolicy": SPEC["runPolicy"] | policy}
        space.apply(
            {
                "apiVersion": "tpu-operator.dev/v1alpha1",
                "kind": "TPUTrainingJob",
                "metadata": {"name": name},
                "spec": spec,
            }
        )
    for name in (STEADY, UNLUCKY):
        space.wait_for_state("Running", name)
    space.wait_for_state("Suspended", PAUSED)
    before, written = gangs(space), specs(space)
    assert len(before["pods"]) == 8
    old.stop()

    cluster.helm("upgrade", str(CHART), "--reset-then-reuse-values")
    assert stored_definition(cluster) != definition
    new.run()
    new.wait_until_it_knows(running=2)
    assert gangs(space) == before
    assert contains(specs(space), written)

    # What the new operator then writes is for the old one to read.
    space.finish(f"{UNLUCKY}-1-0-2", exit_code=137)
    space.wait_for_state("Running", UNLUCKY, attempt=2)
    after = gangs(space)
    assert after["statuses"][STEADY] == before["statuses"][STEADY]
    new.stop()

    cluster.helm("rollback")
    assert stored_definition(cluster) == definition
    old.run()
    old.wait_until_it_knows(running=2)
    assert gangs(space) == after
    assert specs(space) == written

    space.finish(f"{UNLUCKY}-2-0-1", exit_code=137)
    space.wait_for_state("Running", UNLUCKY, attempt=3)
    assert space.status(UNLUCKY)["restarts"]["byClass"] == [{"class": "Infrastructure", "count": 2}]
    old.stop()


def stored_definition(cluster: Cluster) -> str:
    """Its fields and rules, and the version of the chart that it is from."""
    found = json.loads(cluster.kubectl("get", "crd/tputrainingjobs.tpu-operator.dev", "-o=json"))
    return json.dumps([found["metadata"]["labels"]["helm.sh/chart"], found["spec"]])
