"""A job in a queue on a real API server with Kueue's own definitions. The test plays Kueue's scheduler.

The stories are told at the same time, each with jobs of its own.
"""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import kueue
from tests.cluster.api import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import cpu_nodes_for
from tests.cluster.namespaces import emptied_namespace
from tests.controlplane.jobs import Namespace, condition, digits
from tests.controlplane.operator_process import ACCOUNT, OperatorProcess
from tests.stories import Group, Stories, selected, told_together
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.cluster_state.workload import Priority, Queue, workload_name
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.worker_pod import worker_pod
from tpu_training_operator.domain.objects.workload import workload

Object = dict[str, Any]

_RBAC = Path(__file__).with_name("kueue_rbac.yaml")
_API = "apis/kueue.x-k8s.io/v1beta2"
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


# As Kueue 0.19 says it.
_TOO_LARGE = (
    "couldn't assign flavors to pod set main: insufficient quota for google.com/tpu in flavor simulated, previously"
    " considered podsets requests (0) + current podset request (16) > maximum capacity (8)"
)


@pytest.fixture(scope="module")
def granted(control_plane: ControlPlane, served_everywhere: OperatorProcess) -> OperatorProcess:
    """The operator, with the chart's rights for queues."""
    namespace = served_everywhere.namespace
    bindings = [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{role}-{namespace}"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        }
        for role in ("tpu-training-operator-workloads", "tpu-training-operator-kueue")
    ]
    control_plane.kubectl("apply", "-f", str(_RBAC))
    control_plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(bindings))
    return served_everywhere


class Kueue:
    """What Kueue's scheduler writes into one Workload: that with the name, or the only one of the namespace."""

    def __init__(self, space: Namespace, name: str = "") -> None:
        self._space = space
        self._name = name

    def workload(self) -> Object:
        return next((item for item in self._all() if self._name in ("", item["metadata"]["name"])), {})

    def says(self, kind: str) -> tuple[str, str]:
        found = condition(self.workload().get("status", {}), kind)
        return str(found.get("status", "")), str(found.get("reason", ""))

    def names(self) -> list[str]:
        """Of all Workloads of the namespace."""
        return [item["metadata"]["name"] for item in self._all()]

    def _all(self) -> list[Object]:
        return self._space.all("workloads", _API)

    def never_admits(self) -> None:
        self._write([("QuotaReserved", "False", "Pending")], (), {}, _TOO_LARGE)

    def admit(self) -> None:
        hosts = self.workload()["spec"]["podSets"][0]["count"]
        assignment = {
            "name": "main",
            "count": hosts,
            "flavors": {"cpu": "simulated"},
            "resourceUsage": {"cpu": str(hosts)},
        }
        self._write(
            [("QuotaReserved", "True", "QuotaReserved"), ("Admitted", "True", "Admitted")],
            ("Evicted",),
            {"admission": {"clusterQueue": "tpus", "podSetAssignments": [assignment]}},
        )

    def evict(self) -> None:
        self._write([("Evicted", "True", "Preempted"), ("Preempted", "True", "InClusterQueue")], (), {})

    def _write(
        self, conditions: list[tuple[str, str, str]], ended: tuple[str, ...], status: Object, message: str = ""
    ) -> None:
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
                "message": message or f"said by the test: {reason}",
                "lastTransitionTime": now,
            }
        found["status"] = found.get("status", {}) | status | {"conditions": list(known.values())}
        path = f"/{_API}/namespaces/{self._space.name}/workloads/{found['metadata']['name']}/status"
        try:
            self._space.cluster.api.call("PUT", f"{path}?fieldManager=kueue-admission&fieldValidation=Strict", found)
        except ApiError as error:
            if error.status != 409:
                raise
            # The operator has written meanwhile. Kueue, too, would look again.
            self._write(conditions, ended, status, message)


def a_queued_job_is_admitted_evicted_admitted_again_and_finishes(space: Namespace, operator: OperatorProcess) -> None:
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
    space.wait(lambda: condition(space.status(), "Admitted")["reason"] == "QuotaReleased", "the quota is free")
    assert "restarts" not in space.status() or "byClass" not in space.status()["restarts"]


def a_queued_job_takes_the_slice_that_is_admitted_and_returns_when_the_better_one_is(
    space: Namespace, operator: OperatorProcess
) -> None:
    job = _queued("digits", {})
    smaller = job["spec"]["slice"] | {"acceleratorType": "v5litepod-8"}
    alternatives = [{"slice": smaller, "waitForPreviousSeconds": 600}]
    job["spec"] |= {
        "placement": {"alternatives": alternatives, "returnToPreferred": "AtCheckpoint", "minRunSeconds": 1},
        "checkpoint": {"uri": "gs://bucket/jobs"},
    }
    space.apply(job)
    space.wait_for_state("Queued")
    metadata = space.job()["metadata"]
    own, other = (workload_name("digits", metadata["uid"], number) for number in (0, 1))
    wished, second = Kueue(space, own), Kueue(space, other)
    assert wished.names() == [own]

    wished.never_admits()
    space.wait(lambda: second.names() == [other], "the job asks for its alternative only")
    assert second.workload()["spec"]["podSets"][0]["count"] == 2
    second.admit()
    space.wait_for_state("Running", attempt=2)
    assert len(space.pods()) == 2

    space.wait(lambda: set(wished.names()) == {own, other}, "the job asks for its own slice, too")
    wished.admit()
    space.wait_for_state("Running", attempt=3)
    assert (wished.names(), len(space.pods())) == ([own], 4)
    moves = [(move["from"], move["to"], move["reason"]) for move in space.status()["placement"]["moves"]]
    assert moves == [(0, 1, "NotAdmitted"), (1, 0, "Better")]


def a_queued_job_on_two_slices_runs_on_the_one_that_is_admitted_and_grows_when_both_are(
    space: Namespace, operator: OperatorProcess
) -> None:
    job = _queued("digits", {})
    job["spec"]["slice"] |= {"acceleratorType": "v5litepod-8", "count": 2}
    job["spec"] |= {
        "placement": {"count": {"min": 1}, "returnToPreferred": "AtCheckpoint", "minRunSeconds": 1},
        "checkpoint": {"uri": "gs://bucket/jobs"},
    }
    space.apply(job)
    space.wait_for_state("Queued")
    uid = space.job()["metadata"]["uid"]
    both, one = (Kueue(space, workload_name("digits", uid, number)) for number in (0, 1))
    assert both.workload()["spec"]["podSets"][0]["count"] == 4

    both.never_admits()
    space.wait(lambda: one.names() == [workload_name("digits", uid, 1)], "the job asks for one slice only")
    assert one.workload()["spec"]["podSets"][0]["count"] == 2
    one.admit()
    space.wait_for_state("Running", attempt=2)
    assert _slices(space) == ["0", "0"]

    space.wait(lambda: both.workload() != {}, "the job asks for both slices while it trains on one")
    both.admit()
    space.wait_for_state("Running", attempt=3)
    assert (_slices(space), len(both.names())) == (["0", "0", "1", "1"], 1)
    assert not any("hold" in name for name in space.names("pods"))

    both.evict()
    space.wait(lambda: both.says("QuotaReserved")[0] == "False", "the quota is given back")
    status = space.status()
    assert (space.pods(), status["state"], status["placement"]["slice"]) == ([], "Queued", "2 x v5litepod-8")
    assert [move["reason"] for move in status["placement"]["moves"]] == ["NotAdmitted", "Better"]


def _slices(space: Namespace) -> list[str]:
    """Of each worker."""
    return [pod["metadata"]["labels"]["tpu-operator.dev/slice-index"] for pod in space.pods()]


def a_job_for_another_cluster_has_no_worker_and_its_copy_runs_under_the_workload_that_it_finds(
    space: Namespace, operator: OperatorProcess
) -> None:
    """One API server plays both clusters."""
    job = _queued("digits", {})
    job["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    space.apply(job)
    space.wait_for_state("Queued")
    here = Kueue(space).workload()

    labels = {"kueue.x-k8s.io/multikueue-origin": "here"}
    body = {key: here[key] for key in ("apiVersion", "kind", "spec")}
    body["metadata"] = {"name": "prebuilt", "labels": labels}
    space.kubectl("create", "-f", "-", input=json.dumps(body))
    there = Kueue(space, "prebuilt")
    there.admit()
    space.apply(_queued("copy", labels | {"kueue.x-k8s.io/prebuilt-workload-name": "prebuilt"}))
    space.wait_for_state("Running", "copy")
    space.wait(lambda: there.says("PodsReady") == ("True", "Started"), "Kueue knows that the workers are ready")
    (owner,) = there.workload()["metadata"]["ownerReferences"]
    assert (owner["name"], owner["controller"]) == ("copy", True)
    assert (len(space.pods("copy")), space.pods("digits")) == (4, [])


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


STORIES = {
    story.__name__: story
    for story in (
        a_queued_job_is_admitted_evicted_admitted_again_and_finishes,
        a_queued_job_takes_the_slice_that_is_admitted_and_returns_when_the_better_one_is,
        a_queued_job_on_two_slices_runs_on_the_one_that_is_admitted_and_grows_when_both_are,
        a_job_for_another_cluster_has_no_worker_and_its_copy_runs_under_the_workload_that_it_finds,
    )
}


def test_a_cluster_without_kueue_is_said(control_plane: ControlPlane, namespace: str, granted: OperatorProcess) -> None:
    """Comes before the others, which need Kueue."""
    space = Namespace(control_plane, namespace)
    space.apply(_queued("early", {}))
    status = space.wait_for_state("Blocked", "early")
    assert "(kueue.x-k8s.io/v1beta2 or" in condition(status, "Ready")["message"]


@pytest.fixture(scope="module")
def stories(control_plane: ControlPlane, granted: OperatorProcess, request: pytest.FixtureRequest) -> Iterator[Stories]:
    kueue.install(control_plane)
    control_plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all([_FLAVOR, _CLASS]))

    def tell(story: Callable[[Namespace, OperatorProcess], None]) -> None:
        with emptied_namespace(control_plane.api) as name:
            story(Namespace(control_plane, name), granted)

    chosen = {name: partial(tell, STORIES[name]) for name in selected(request, STORIES)}
    with cpu_nodes_for(control_plane, 4), told_together(Group(chosen, at_once=len(STORIES))) as told:
        yield told


@pytest.mark.parametrize("story", STORIES)
def test_with_kueue(story: str, stories: Stories) -> None:
    stories.end_of(story)
