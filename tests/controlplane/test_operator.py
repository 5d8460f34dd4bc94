"""The operator as its own process against a real API server: what a user applies, sees, breaks and deletes."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import kubectl_timeout
from tests.cluster.kwok import cpu_nodes_for
from tests.controlplane.jobs import Namespace, condition, digits
from tests.controlplane.operator_process import OperatorProcess

WORKERS = [f"digits-1-0-{host}" for host in range(4)]
LAST_WORDS = {"outcome": "Succeeded", "message": "", "step": 300, "metrics": {"loss": 0.01, "accuracy": 0.975}}


@pytest.fixture(scope="module")
def cpu_nodes(control_plane: ControlPlane) -> Iterator[None]:
    with cpu_nodes_for(control_plane, 4):
        yield


@pytest.fixture
def space(control_plane: ControlPlane, job_definition: None, cpu_nodes: None, namespace: str) -> Namespace:
    return Namespace(control_plane, namespace)


def uids(space: Namespace) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in space.pods()}


def finish_all(space: Namespace, attempt: int = 1) -> None:
    for host in range(4):
        space.finish(f"digits-{attempt}-0-{host}", message=LAST_WORDS if host == 0 else None)


def test_a_job_runs_from_apply_to_succeeded(space: Namespace, operator: OperatorProcess) -> None:
    space.apply(digits())

    status = space.wait_for_state("Running")
    assert [pod["metadata"]["name"] for pod in space.pods()] == WORKERS
    assert condition(status, "GangReady")["status"] == "True"
    assert condition(status, "Reconciling") == {}
    assert (status["resolved"]["globalBatchSize"], status["resolved"]["trainSteps"]) == (128, 300)
    space.kubectl("wait", "--for=condition=Ready", "tpujob/digits", kubectl_timeout(10))

    finish_all(space)
    status = space.wait_for_state("Succeeded")
    assert status["progress"]["metrics"] == {"loss": "0.01", "accuracy": "0.975"}
    assert status["progress"]["step"] == 300
    space.kubectl("wait", "--for=condition=Succeeded", "tpujob/digits", kubectl_timeout(10))
    columns = space.kubectl("get", "tpujob", "--no-headers").split()
    assert columns[:7] == ["digits", "Succeeded", "v5litepod-16", "4", "1", "300", "100"]
    found = {
        selector: space.kubectl("get", "tpujob", "--output=name", f"--field-selector={selector}").strip()
        for selector in ("status.state=Succeeded", "status.state=Running", "spec.slice.acceleratorType=v5litepod-16")
    }
    assert list(found.values()) == [
        "tputrainingjob.tpu-operator.dev/digits",
        "",
        "tputrainingjob.tpu-operator.dev/digits",
    ]
    reasons = space.kubectl("get", "events.events.k8s.io", "-o", "jsonpath={.items[*].reason}").split()
    assert {"Running", "Succeeded"} <= set(reasons)


def test_the_operator_leaves_no_mark_on_what_the_user_wrote(space: Namespace, operator: OperatorProcess) -> None:
    space.apply(digits())
    space.wait_for_state("Running")

    metadata = space.job()["metadata"]

    assert metadata["generation"] == 1
    assert "finalizers" not in metadata
    assert "labels" not in metadata
    assert "annotations" not in metadata


def test_deleting_the_job_deletes_everything(space: Namespace, operator: OperatorProcess) -> None:
    space.apply(digits())
    space.wait_for_state("Running")
    assert space.names("services") == ["digits"]

    assert space.names("networkpolicies", "apis/networking.k8s.io/v1") == ["digits"]
    space.kubectl("delete", "tpujob", "digits")

    def left() -> list[str]:
        ours = [name for name in space.names("configmaps") if name.startswith("digits")]
        policies = space.names("networkpolicies", "apis/networking.k8s.io/v1")
        return space.names("pods") + space.names("services") + policies + ours

    space.wait(lambda: not left(), "pods, service, network policy and config map are gone")


def test_an_operator_killed_in_mid_training_changes_nothing(space: Namespace, operator: OperatorProcess) -> None:
    space.apply(digits())
    space.wait_for_state("Running")
    before, told = uids(space), space.job()["status"]

    operator.kill()
    # A worker that ends in the second of the last write had given its chips back by then, which is worth another write.
    since = datetime.fromisoformat(told["goodput"]["chipSeconds"]["since"])
    space.wait(lambda: datetime.now(UTC) >= since + timedelta(seconds=1), "the second of the last write is over")
    space.finish("digits-1-0-1")
    operator.start()
    # Once it has started another job, it has reconciled this one, too.
    space.apply(digits() | {"metadata": {"name": "other"}})
    space.wait_for_state("Running", name="other")

    assert uids(space) == before
    assert space.job()["status"] == told
    for host in (0, 2, 3):
        space.finish(f"digits-1-0-{host}")
    assert space.wait_for_state("Succeeded")["attempt"] == 1
    assert uids(space) == before


def test_the_next_operator_completes_a_gang_whose_creation_was_interrupted(
    space: Namespace, operator: OperatorProcess
) -> None:
    space.apply(digits(slice={"acceleratorType": "v5litepod-256"}))
    space.wait(lambda: len(space.names("pods")) > 0, "the first worker exists")
    operator.kill()
    existing = uids(space)

    operator.start()
    status = space.wait_for_state("Running")

    assert status["attempt"] == 1
    assert len(uids(space)) == 64
    assert existing.items() <= uids(space).items()


def test_a_lost_worker_restarts_the_whole_gang_once(space: Namespace, operator: OperatorProcess) -> None:
    space.apply(digits(runPolicy={"restart": {"backoff": {"initialSeconds": 1}}}))
    space.wait_for_state("Running")

    space.finish("digits-1-0-2", exit_code=137)
    space.finish("digits-1-0-0", exit_code=69, message={"outcome": "PeerLost", "message": "lost host 2"})

    status = space.wait_for_state("Running", attempt=2)
    # The failed pod stays for its log.
    left = ["digits-1-0-2", *(f"digits-2-0-{host}" for host in range(4))]
    assert [pod["metadata"]["name"] for pod in space.pods()] == left
    assert status["restarts"]["byClass"] == [{"class": "Infrastructure", "count": 1}]
    failure = status["lastFailure"]
    assert (failure["pod"], failure["exitCode"], failure["class"]) == ("digits-1-0-2", 137, "Infrastructure")
    finish_all(space, attempt=2)
    space.wait_for_state("Succeeded")


def test_suspend_and_resume_are_not_charged_and_may_change_the_workers(
    space: Namespace, operator: OperatorProcess
) -> None:
    toleration = {"key": "team", "operator": "Exists"}
    space.apply(digits())
    space.wait_for_state("Running")

    space.patch_spec({"runPolicy": {"suspend": True}})
    space.wait(lambda: space.names("pods") == [], "all workers are gone")
    assert condition(space.wait_for_state("Suspended"), "Suspended")["status"] == "True"
    space.kubectl("wait", "--for=condition=Ready", "tpujob/digits", kubectl_timeout(30))
    space.patch_spec({"trainer": {"tolerations": [toleration]}})

    space.patch_spec({"runPolicy": {"suspend": False}})
    status = space.wait_for_state("Running", attempt=2)
    assert "restarts" not in status
    assert [toleration in pod["spec"]["tolerations"] for pod in space.pods()] == [True] * 4


def test_a_misspelt_field_of_a_volume_is_named_and_corrected(space: Namespace, operator: OperatorProcess) -> None:
    space.apply(digits(trainer={"volumes": [{"name": "scratch", "emptyDir": {"sizeLimitt": "1Gi"}}]}))
    stalled = condition(space.wait_for_state("Blocked"), "Stalled")
    assert '.emptyDir.sizeLimitt"' in stalled["message"]

    space.patch_spec({"runPolicy": {"suspend": True}})
    space.wait_for_state("Suspended")
    corrected = {"volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}]}
    space.patch_spec({"trainer": corrected, "runPolicy": {"suspend": False}})
    space.wait_for_state("Running")


def test_a_job_that_pod_security_refuses_says_what_to_leave_out_and_runs_once_it_is_admitted(
    space: Namespace, operator: OperatorProcess
) -> None:
    level = "pod-security.kubernetes.io/enforce"
    space.kubectl("label", "namespace", space.name, f"{level}=baseline")
    space.apply(digits(trainer={"securityContext": {"runAsUser": 0, "privileged": True}}))

    stalled = condition(space.wait_for_state("Blocked"), "Stalled")
    assert stalled["reason"] == "NotPermitted"
    assert stalled["message"].endswith(
        "; leave out spec.trainer.securityContext.privileged, or let an administrator label the namespace"
        f" {level}=privileged"
    )

    space.kubectl("label", "--overwrite", "namespace", space.name, f"{level}=privileged")
    space.wait_for_state("Running")


def test_a_service_with_another_owner_is_left_alone_and_named(space: Namespace, operator: OperatorProcess) -> None:
    space.kubectl("create", "service", "clusterip", "digits", "--tcp=80")
    before = space.kubectl("get", "service", "digits", "-o", "jsonpath={.metadata.uid}")

    space.apply(digits())

    stalled = condition(space.wait_for_state("Blocked"), "Stalled")
    assert stalled["reason"] == "NameConflict"
    assert "Service digits already exists" in stalled["message"]
    assert space.kubectl("get", "service", "digits", "-o", "jsonpath={.metadata.uid}") == before
