"""The digits job on real nodes: README's commands exactly as written, and what may happen during a training."""

import json
import re

import pytest

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.processes import wait_until
from tests.e2e.readme import cluster_commands
from tests.e2e.space import HOSTS, JOBS, REPOSITORY, Space, status
from tests.e2e.together import Story
from tests.stories import Stories

OPERATOR = ("--namespace", "tpu-system")
WORKERS = [f"digits-1-0-{host}" for host in range(4)]


def test_the_operator_runs_restricted(quick_start: dict[str, str]) -> None:
    [pod] = json.loads(quick_start["operator"])["items"]
    assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_helm_test_finds_the_operator_ready_and_leaves_nothing(cluster: Cluster, quick_start: dict[str, str]) -> None:
    assert re.search(r"Phase: +Succeeded", quick_start["helm test tpu-training-operator"])
    for kind in ("pods", "roles", "rolebindings"):
        left = cluster.kubectl(*OPERATOR, "get", kind, "-o", "name").stdout
        assert "tpu-training-operator-test" not in left


def test_the_job_in_the_readme_trains_on_both_nodes(cluster: Cluster, quick_start: dict[str, str]) -> None:
    done = status(cluster)
    assert (done["state"], done["attempt"]) == ("Succeeded", 1)
    assert float(done["progress"]["metrics"]["accuracy"]) >= 0.95
    pods = json.loads(quick_start["workers"])["items"]
    assert [pod["metadata"]["name"] for pod in pods] == WORKERS
    assert {pod["spec"]["nodeName"] for pod in pods} == set(cluster.nodes)


def test_the_columns_and_the_description_say_what_happened(quick_start: dict[str, str]) -> None:
    columns = quick_start["kubectl get tpujob"].splitlines()[1].split()
    assert columns[:7] == ["digits", "Succeeded", "v5litepod-16", "4", "1", "300", "100"]
    described = quick_start["kubectl describe tpujob"]
    for told in ("learningRate: 0.05 x 4 = 0.2 (linear rule", "all 4 workers are ready", "all 4 workers have finished"):
        assert told in described


def test_the_training_has_the_result_that_the_documentation_shows(
    cluster: Cluster, quick_start: dict[str, str]
) -> None:
    page = (REPOSITORY / "docs" / "status.md").read_text()
    metrics = re.search(r"Metrics:\n +Accuracy: +(\S+)\n +Loss: +(\S+)\n", page)
    accuracy, loss = map(float, metrics.groups())

    there = {name: float(value) for name, value in status(cluster)["progress"]["metrics"].items()}

    # Processors round differently; every other seed, batch or rate differs by more.
    assert there["accuracy"] == pytest.approx(accuracy, abs=0.003)
    assert there["loss"] == pytest.approx(loss, abs=0.0005)


def a_job_deleted_in_mid_flight_leaves_nothing(space: Space) -> None:
    space.apply_waiting()
    space.wait_running()
    containers = {pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2] for pod in space.pods()}
    assert len(containers) == HOSTS

    space.kubectl("delete", "tpujob", "digits")

    def left() -> list[str]:
        ours = [name for name in space.names("configmaps") if name.startswith("digits")]
        return space.names("pods") + space.names("services") + ours

    wait_until(lambda: not left(), timeout=90, what="pods, service and config map are gone")
    if space.cluster.owns_nodes:
        running = {container for node in space.cluster.nodes for container in space.cluster.running_containers(node)}
        assert not containers & running


def applying_twice_as_gitops_tools_do_changes_nothing(space: Space) -> None:
    job = space.waiting()
    apply = ("apply", "--server-side", "--field-manager=argocd-controller", "-f", "-")
    space.kubectl(*apply, input=job)
    space.kubectl("wait", "--for=jsonpath={.status.attempt}=1", "tpujob/digits", kubectl_timeout(60))

    diff = ("diff", "--server-side", "--field-manager=argocd-controller", "-f", "-")
    assert space.kubectl(*diff, input=job) == ""
    space.kubectl(*apply, input=job)
    assert json.loads(space.kubectl("get", "tpujob", "digits", "-o", "json"))["metadata"]["generation"] == 1


STORIES = {
    story.__name__: Story.of_a_space(story)
    for story in (
        a_job_deleted_in_mid_flight_leaves_nothing,
        applying_twice_as_gitops_tools_do_changes_nothing,
    )
}


@pytest.mark.parametrize("story", STORIES)
def test_with_the_operator(story: str, stories: Stories) -> None:
    stories.end_of(story)


def test_an_upgrade_of_the_operator_does_not_touch_a_training(alone: None, space: Space) -> None:
    space.apply_waiting()
    space.wait_running()
    before = space.uids()

    chart = str(REPOSITORY / "build" / "chart")
    values = ("--reset-then-reuse-values", "--set", "logLevel=DEBUG")
    space.cluster.helm("upgrade", "tpu-training-operator", chart, *OPERATOR, *values)
    space.cluster.kubectl(*OPERATOR, "rollout", "status", "deployment/tpu-training-operator", kubectl_timeout(120))
    # Once the new operator has started another job, it has reconciled every job.
    space.apply_waiting("other")
    space.wait_running("other")

    assert before.items() <= space.uids().items()
    assert status(space.cluster, namespace=space.name)["attempt"] == 1


def test_tpu_workers_go_where_their_chips_are(alone: None, space: Space) -> None:
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
        wait_until(lambda: not space.names("pods"), timeout=90, what="the workers are gone")
        for node in cluster.nodes:
            cluster.make_plain_node(node)


def recipe_on(accelerator_type: str) -> Object:
    return {
        "tunedOn": {"acceleratorType": accelerator_type},
        "globalBatchSize": 64,
        "trainSteps": 1,
        "optimizer": {"name": "sgd", "learningRate": 0.1},
    }


def test_uninstalling_keeps_definition_jobs_and_pods(alone: None, space: Space) -> None:
    space.apply_waiting()
    space.wait_running()
    before = space.uids()
    try:
        space.cluster.helm("uninstall", "tpu-training-operator", *OPERATOR, "--wait", kubectl_timeout(300))
        assert space.names(JOBS) == ["digits"]
        assert space.uids() == before
    finally:
        [install] = [words for program, *words in cluster_commands() if words[0] == "install"]
        words = [str(REPOSITORY / word) if (REPOSITORY / word).exists() else word for word in install]
        space.cluster.helm(*words, "--wait", kubectl_timeout(300))
