"""The digits job on real nodes: README's commands as they stand, and what may happen to a training on the way."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.api import Object
from tests.cluster.nodes import RealCluster
from tests.cluster.processes import wait_until
from tests.e2e.readme import cluster_commands

REPOSITORY = Path(__file__).parents[2]
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
OPERATOR = ("--namespace", "tpu-system")
WORKERS = [f"digits-1-0-{host}" for host in range(4)]

# A worker that runs until it is told to stop, and then ends as a preempted trainer does.
WAITS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); time.sleep(3600)"


@pytest.fixture(scope="module")
def quick_start(cluster: RealCluster, images: None) -> dict[str, str]:
    """README's commands, run in order; what each printed, by its first three words."""
    cluster.kubectl("create", "namespace", "tpu-system")
    for namespace in ("tpu-system", "default"):
        cluster.kubectl("label", "namespace", namespace, RESTRICTED)
    printed = {}
    for program, *words in cluster_commands():
        run = {"helm": cluster.helm, "kubectl": cluster.kubectl}[program]
        words = [str(REPOSITORY / word) if (REPOSITORY / word).exists() else word for word in words]
        printed[" ".join([program, *words][:3])] = run(*words).stdout
    return printed


@pytest.fixture
def space(cluster: RealCluster, quick_start: dict[str, str], namespace: str) -> Iterator["Space"]:
    """A restricted namespace in a cluster where the operator runs."""
    space = Space(cluster, namespace)
    yield space
    space.kubectl("delete", "tpujob", "--all", "--wait=false")


class Space:
    """One namespace, seen as a user sees it."""

    def __init__(self, cluster: RealCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def kubectl(self, *args: str, **options: Any) -> str:
        return self.cluster.kubectl("--namespace", self.name, *args, **options).stdout

    def names(self, kind: str) -> list[str]:
        return self.kubectl("get", kind, "-o", "jsonpath={.items[*].metadata.name}").split()

    def pods(self) -> list[Object]:
        found: list[Object] = json.loads(self.kubectl("get", "pods", "-o", "json"))["items"]
        return found

    def uids(self) -> dict[str, str]:
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.pods()}

    def apply_waiting(self, name: str = "digits", **changes: Any) -> None:
        """The digits job with workers that only wait."""
        job = yaml.safe_load((REPOSITORY / "examples" / "digits.yaml").read_text())
        job["metadata"]["name"] = name
        del job["spec"]["trainer"]["entrypoint"]
        job["spec"]["trainer"] |= {"command": ["python3", "-c", WAITS], "terminationGracePeriodSeconds": 5}
        job["spec"] |= changes
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump(job))

    def wait_running(self, name: str = "digits") -> None:
        self.kubectl("wait", "--for=condition=GangReady", f"tpujob/{name}", "--timeout=120s")


def status(cluster: RealCluster, name: str = "digits", namespace: str = "default") -> Object:
    found: Object = json.loads(cluster.kubectl("get", "tpujob", name, "-n", namespace, "-o", "json").stdout)
    read: Object = found["status"]
    return read


def test_the_operator_runs_restricted(cluster: RealCluster, quick_start: dict[str, str]) -> None:
    [pod] = json.loads(cluster.kubectl(*OPERATOR, "get", "pods", "-o", "json").stdout)["items"]
    assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_readmes_job_is_trained_over_both_nodes(cluster: RealCluster, quick_start: dict[str, str]) -> None:
    done = status(cluster)
    assert (done["state"], done["attempt"]) == ("Succeeded", 1)
    assert float(done["progress"]["metrics"]["accuracy"]) >= 0.95
    pods = json.loads(cluster.kubectl("get", "pods", "-o", "json").stdout)["items"]
    assert [pod["metadata"]["name"] for pod in pods] == WORKERS
    assert {pod["spec"]["nodeName"] for pod in pods} == set(cluster.nodes)


def test_the_columns_and_the_description_say_what_happened(quick_start: dict[str, str]) -> None:
    columns = quick_start["kubectl get tpujob"].splitlines()[1].split()
    assert columns[:6] == ["digits", "Succeeded", "v5litepod-16", "4", "1", "300"]
    described = quick_start["kubectl describe tpujob"]
    for told in ("learningRate: 0.05 x 4 = 0.2 (linear rule", "AttemptStarted", "all 4 workers have finished"):
        assert told in described


def test_the_cluster_trains_to_the_result_of_local_mode(
    cluster: RealCluster, quick_start: dict[str, str], tmp_path: Path
) -> None:
    tpujob = [str(Path(sys.prefix) / "bin" / "tpujob"), "run", "-f", "examples/digits.yaml"]
    subprocess.run([*tpujob, "--output-dir", str(tmp_path)], cwd=REPOSITORY, check=True, capture_output=True)
    local = json.loads((tmp_path / "result.json").read_text())["metrics"]

    there = {name: float(value) for name, value in status(cluster)["progress"]["metrics"].items()}

    assert there["accuracy"] == pytest.approx(local["accuracy"], abs=1e-6)
    assert there["loss"] == pytest.approx(local["loss"], abs=1e-5)


def test_workers_have_the_names_that_the_gang_meets_by(space: Space) -> None:
    space.apply_waiting()
    space.wait_running()
    look_up = "import os, socket; print(*map(socket.gethostbyname, os.environ['TPU_WORKER_HOSTNAMES'].split(',')))"
    addresses = space.kubectl("exec", "digits-1-0-3", "--", "python3", "-c", look_up).split()
    assert addresses == [pod["status"]["podIP"] for pod in space.pods()]


def test_two_jobs_run_side_by_side(space: Space) -> None:
    for name in ("first", "second"):
        space.apply_waiting(name)
    for name in ("first", "second"):
        space.wait_running(name)
    assert space.names("pod") == [f"{name}-1-0-{host}" for name in ("first", "second") for host in range(4)]


def test_a_job_deleted_in_mid_flight_leaves_nothing(space: Space) -> None:
    space.apply_waiting()
    space.wait_running()
    containers = {pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2] for pod in space.pods()}
    assert len(containers) == 4

    space.kubectl("delete", "tpujob", "digits")

    def left() -> list[str]:
        ours = [name for name in space.names("configmap") if name.startswith("digits")]
        return space.names("pod") + space.names("service") + ours

    wait_until(lambda: not left(), timeout=90, what="pods, service and config map are gone")
    if space.cluster.owns_nodes:
        running = {container for node in space.cluster.nodes for container in space.cluster.running_containers(node)}
        assert not containers & running


def test_an_upgrade_of_the_operator_does_not_touch_a_training(space: Space) -> None:
    space.apply_waiting()
    space.wait_running()
    before = space.uids()

    chart = str(REPOSITORY / "charts" / "tpu-training-operator")
    values = ("--reset-then-reuse-values", "--set", "logLevel=DEBUG")
    space.cluster.helm("upgrade", "tpu-training-operator", chart, *OPERATOR, *values)
    space.cluster.kubectl(*OPERATOR, "rollout", "status", "deployment/tpu-training-operator", "--timeout=120s")
    # The new operator has looked at every job once it has brought up another.
    space.apply_waiting("other")
    space.wait_running("other")

    assert before.items() <= space.uids().items()
    assert status(space.cluster, namespace=space.name)["attempt"] == 1


def test_applying_twice_as_gitops_tools_do_changes_nothing(space: Space) -> None:
    job = yaml.safe_dump(yaml.safe_load((REPOSITORY / "examples" / "digits.yaml").read_text()))
    apply = ("apply", "--server-side", "--field-manager=argocd-controller", "-f", "-")
    space.kubectl(*apply, input=job)
    space.kubectl("wait", "--for=jsonpath={.status.attempt}=1", "tpujob/digits", "--timeout=60s")

    diff = ("diff", "--server-side", "--field-manager=argocd-controller", "-f", "-")
    assert space.kubectl(*diff, input=job) == ""
    space.kubectl(*apply, input=job)
    assert json.loads(space.kubectl("get", "tpujob", "digits", "-o", "json"))["metadata"]["generation"] == 1


def test_tpu_workers_go_where_their_chips_are(space: Space) -> None:
    cluster = space.cluster
    for node in cluster.nodes:
        cluster.make_tpu_node(node, "tpu-v5-lite-podslice", "2x4", chips=4, pool="v5e-2x4")
    try:
        space.apply_waiting(slice={"acceleratorType": "v5litepod-8"}, recipe=recipe_on("v5litepod-8"))
        space.wait_running()
        assert {pod["spec"]["nodeName"] for pod in space.pods()} == set(cluster.nodes)
        containers = [pod["spec"]["containers"][0] for pod in space.pods()]
        assert [c["resources"]["limits"] for c in containers] == [{"google.com/tpu": "4"}] * 2
    finally:
        space.kubectl("delete", "tpujob", "digits")
        wait_until(lambda: not space.names("pod"), timeout=90, what="the workers are gone")
        for node in cluster.nodes:
            cluster.make_plain_node(node)


def recipe_on(accelerator_type: str) -> Object:
    return {
        "tunedOn": {"acceleratorType": accelerator_type},
        "globalBatchSize": 64,
        "trainSteps": 1,
        "optimizer": {"name": "sgd", "learningRate": "0.1"},
    }


def test_uninstalling_keeps_definition_jobs_and_pods(space: Space) -> None:
    space.apply_waiting()
    space.wait_running()
    before = space.uids()
    try:
        space.cluster.helm("uninstall", "tpu-training-operator", *OPERATOR, "--wait")
        assert space.names("tpujob") == ["digits"]
        assert space.uids() == before
    finally:
        [install] = [words for program, *words in cluster_commands() if words[0] == "install"]
        words = [str(REPOSITORY / word) if (REPOSITORY / word).exists() else word for word in install]
        space.cluster.helm(*words, "--wait")
