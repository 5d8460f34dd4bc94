"""A job in a queue on a real API server with Kueue's own definitions. The test plays Kueue's scheduler."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import kueue
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import add_cpu_nodes, remove_nodes
from tests.controlplane.jobs import Namespace, condition, digits
from tests.controlplane.operator_process import ACCOUNT, OperatorProcess
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.objects.worker_pod import worker_pod
from tpu_training_operator.domain.objects.workload import workload
from tpu_training_operator.domain.recipe.resolve import resolve
from tpu_training_operator.domain.workload import Priority, Queue

Object = dict[str, Any]

_RBAC = Path(__file__).with_name("kueue_rbac.yaml")
_LABEL = "kueue.x-k8s.io/queue-name"
_FLAVOR = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "ResourceFlavor",
    "metadata": {"name": "simulated"},
    "spec": {
        "nodeLabels": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "queue", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}],
    },
}
_CLASS = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "WorkloadPriorityClass",
    "metadata": {"name": "urgent"},
    "value": 1000,
}


@pytest.fixture
def space(control_plane: ControlPlane, job_definition: None, namespace: str) -> Iterator[Namespace]:
    pool = add_cpu_nodes(control_plane, 4)
    yield Namespace(control_plane, namespace)
    remove_nodes(control_plane, pool)


@pytest.fixture
def operator(control_plane: ControlPlane, space: Namespace) -> Iterator[OperatorProcess]:
    process = OperatorProcess(control_plane, space.name)
    _grant(control_plane, space.name)
    process.start()
    yield process
    process.stop()


def _grant(cluster: ControlPlane, namespace: str) -> None:
    subjects = [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}]

    def binding(kind: str, role: str) -> Object:
        return {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": f"{role}-{namespace}", "namespace": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": subjects,
        }

    bindings = [
        binding("RoleBinding", "tpu-training-operator-workloads"),
        binding("ClusterRoleBinding", "tpu-training-operator-kueue"),
    ]
    cluster.kubectl("apply", "-f", str(_RBAC))
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(bindings))


class Kueue:
    """What Kueue's scheduler writes into the one Workload of the namespace."""

    def __init__(self, space: Namespace) -> None:
        self._space = space

    def workload(self) -> Object:
        items = json.loads(self._space.kubectl("get", "workloads.kueue.x-k8s.io", "-o", "json"))["items"]
        return items[0] if items else {}

    def says(self, kind: str) -> tuple[str, str]:
        found = condition(self.workload().get("status", {}), kind)
        return str(found.get("status", "")), str(found.get("reason", ""))

    def admit(self) -> None:
        assignment = {
            "name": "main",
            "count": 4,
            "flavors": {"cpu": "simulated"},
            "resourceUsage": {"cpu": "4"},
        }
        self._write(
            [("QuotaReserved", "True", "QuotaReserved"), ("Admitted", "True", "Admitted")],
            ("Evicted",),
            {"admission": {"clusterQueue": "tpus", "podSetAssignments": [assignment]}},
        )

    def evict(self) -> None:
        self._write([("Evicted", "True", "Preempted"), ("Preempted", "True", "InClusterQueue")], (), {})

    def _write(self, conditions: list[tuple[str, str, str]], ended: tuple[str, ...], status: Object) -> None:
        found = self.workload()
        known = {each["type"]: each for each in found.get("status", {}).get("conditions", [])}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for kind, value, reason in [
            *conditions,
            *((kind, "False", "QuotaReserved") for kind in ended if kind in known),
        ]:
            known[kind] = {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": f"said by the test: {reason}",
                "lastTransitionTime": now,
            }
        found["status"] = found.get("status", {}) | status | {"conditions": list(known.values())}
        self._space.kubectl(
            "replace", "--subresource=status", "--field-manager=kueue-admission", "-f", "-", input=json.dumps(found)
        )


def test_a_queued_job_is_admitted_evicted_admitted_again_and_finishes(
    control_plane: ControlPlane, space: Namespace, operator: OperatorProcess
) -> None:
    _a_cluster_without_kueue_is_said(space)
    kueue.install(control_plane)
    control_plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all([_FLAVOR, _CLASS]))
    scheduler = Kueue(space)
    space.apply(_queued("digits", {"kueue.x-k8s.io/priority-class": "urgent"}))
    space.wait_for_state("Queued")

    body = scheduler.workload()
    assert (body["spec"]["queueName"], body["spec"]["priority"]) == ("research", 1000)
    assert body["spec"]["priorityClassRef"]["name"] == "urgent"
    assert body["spec"]["podSets"][0]["count"] == 4
    assert body["metadata"]["ownerReferences"][0]["uid"] == space.job()["metadata"]["uid"]
    assert space.pods() == []

    _the_older_version_takes_its_form_of_a_workload(space)

    scheduler.admit()
    space.wait_for_state("Running")
    for pod in space.pods():
        assert pod["spec"]["nodeSelector"]["kubernetes.io/os"] == "linux"
        assert "queue" in {toleration.get("key") for toleration in pod["spec"]["tolerations"]}
    space.wait(lambda: scheduler.says("PodsReady") == ("True", "Started"), "Kueue knows that the workers are ready")

    scheduler.evict()
    space.wait(lambda: scheduler.says("QuotaReserved")[0] == "False", "the quota is given back")
    assert space.pods() == []
    assert "admission" not in scheduler.workload()["status"]
    assert (scheduler.says("Requeued")[0], scheduler.says("Admitted")[0]) == ("True", "False")
    assert space.status()["state"] == "Queued"

    operator.kill()
    operator.start()
    scheduler.admit()
    space.wait_for_state("Running", attempt=2)
    for host in range(4):
        space.finish(f"digits-2-0-{host}")
    space.wait_for_state("Succeeded")
    space.wait(lambda: scheduler.says("Finished") == ("True", "Succeeded"), "Kueue knows that the job has finished")
    assert condition(space.status(), "Admitted")["reason"] == "QueueLeft"
    assert "restarts" not in space.status() or "byClass" not in space.status()["restarts"]


def _the_older_version_takes_its_form_of_a_workload(space: Namespace) -> None:
    body = space.job()
    body.pop("status")
    job = parse_job(body)
    resolution, priority = resolve(job.spec), Priority("kueue.x-k8s.io", "urgent", 1000)
    queue = Queue("research", "kueue.x-k8s.io/v1beta1", priority=priority)
    wanted = workload(job, resolution, queue, worker_pod(job, resolution, WorkerId(1, 0, 0)))
    wanted["metadata"]["name"] = "older"
    space.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=json.dumps(wanted))


def _queued(name: str, labels: dict[str, str]) -> Object:
    job = digits(trainer={"resources": {"requests": {"cpu": "1"}}})
    job["metadata"] |= {"name": name, "labels": {_LABEL: "research"} | labels}
    return job


def _a_cluster_without_kueue_is_said(space: Namespace) -> None:
    space.apply(_queued("early", {}))
    status = space.wait_for_state("Blocked", "early")
    assert "this cluster has no Kueue (kueue.x-k8s.io/v1beta2 or" in condition(status, "Ready")["message"]
    space.kubectl("delete", "tpujob", "early")
