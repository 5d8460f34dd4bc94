"""What the operator asks of Kueue's API, and how it reads the answers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.fakes.cluster import FakeCluster
from tests.unit.jobs import job_body
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.job_file import check
from tpu_training_operator.domain.cluster_state.workload import (
    PodSettings,
    Priority,
    Queue,
    Workload,
    pod_settings,
    workload_name,
)
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.workload import conflicts, with_pod_settings, workload
from tpu_training_operator.kube.cluster import KUEUE_VERSIONS, PRIORITY_CLASSES, Object
from tpu_training_operator.kube.errors import ApiError, Forbidden
from tpu_training_operator.runtime.queues import Queues

NO_RIGHTS = Forbidden(403, "Forbidden", "no")


def cluster_with(*versions: str, workloads: Sequence[Object] = (), refusal: ApiError | None = None) -> FakeCluster:
    """A cluster with some versions of Kueue's API."""
    cluster = FakeCluster(*workloads)
    cluster.missing = set(KUEUE_VERSIONS) - {f"kueue.x-k8s.io/{version}" for version in versions}
    if refusal:
        cluster.faults["*"] = refusal
    return cluster


def read(cluster: FakeCluster, body: Object | None = None) -> Queue | None:
    return asyncio.run(Queues(cluster).of(body or a_job()))


def a_job(**changes: Any) -> Object:
    job = job_body(changes)
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    return job


def test_of_a_job_without_a_queue_nothing_is_asked() -> None:
    cluster = cluster_with("v1beta2")
    assert read(cluster, job_body()) is None
    assert cluster.paths == []


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_the_version_that_the_cluster_has_is_found_by_asking(version: str) -> None:
    queue = read(cluster_with(version))
    assert (queue.version, queue.workload, queue.problem) == (f"kueue.x-k8s.io/{version}", None, "")


def test_once_found_a_version_is_asked_first() -> None:
    cluster = cluster_with("v1beta1")
    queues = Queues(cluster)
    for _ in range(2):
        asyncio.run(queues.of(a_job()))
    assert ["v1beta2" in path for path in cluster.paths] == [True, False, False]


def test_a_cluster_without_kueue_is_a_sentence(snapshot: SnapshotAssertion) -> None:
    queue = read(cluster_with())
    assert queue.version == ""
    assert "research" in queue.problem
    assert queue.problem == snapshot


MOVING = {"spec.placement": {"alternatives": [{"slice": {"acceleratorType": "v5litepod-8"}}]}}
LADDER = {"spec.ladder": {"rungs": [{"slice": {"acceleratorType": "v5litepod-4"}, "steps": 10}]}}


def owned(job: Object, number: int = 0, uid: str = "", version: str = "v1beta2", **more: Object) -> Object:
    """The Workload of one of the job's slices."""
    name = workload_name(job["metadata"]["name"], job["metadata"]["uid"], number)
    owner = {"apiVersion": "tpu-operator.dev/v1alpha1", "kind": "TPUTrainingJob", "controller": True}
    owner |= {"name": job["metadata"]["name"], "uid": uid or job["metadata"]["uid"]}
    labels = {"tpu-operator.dev/job-name": job["metadata"]["name"]}
    metadata = {"name": name, "namespace": "default", "uid": str(number), "labels": labels, "ownerReferences": [owner]}
    kind = {"apiVersion": f"kueue.x-k8s.io/{version}", "kind": "Workload"}
    return kind | {"metadata": metadata, "spec": {"queueName": "q"}} | more


@pytest.mark.parametrize("changes", [MOVING, LADDER], ids=["placement", "ladder"])
@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_all_workloads_of_a_job_with_several_slices_are_read_with_one_request(version: str, changes: Object) -> None:
    job = a_job(**changes)
    ours = [owned(job, number, version=version) for number in range(2)]
    cluster = cluster_with(version, workloads=[*ours, owned(job, 2, "of another job", version)])
    queue = read(cluster, job)
    names = [other.workload.name for other in queue.others if other.workload]
    assert sorted(names) == sorted(workload["metadata"]["name"] for workload in ours)
    assert len(cluster.paths) == (1 if version == "v1beta2" else 2)
    there, missing = queue.at(names[1]), queue.at("missing")
    assert (there.workload.name, len(there.others)) == (names[1], 1)
    assert (missing.workload, len(missing.others)) == (None, 2)


@pytest.mark.parametrize(("versions", "said"), [((), "has no Kueue"), (("v1beta2",), "kueue.enabled=true")])
def test_what_is_missing_for_a_job_with_several_slices_is_a_sentence(versions: tuple[str, ...], said: str) -> None:
    queue = read(cluster_with(*versions, refusal=NO_RIGHTS if versions else None), a_job(**MOVING))
    assert said in queue.problem


def test_a_job_with_several_slices_that_has_left_its_queue_has_none() -> None:
    job = a_job(**MOVING)
    job["metadata"]["labels"] = {}
    job["status"] = {"conditions": [{"type": "Admitted", "status": "True", "reason": "Admitted"}]}
    assert read(cluster_with("v1beta2"), job) is None
    assert read(cluster_with("v1beta2", workloads=[owned(job, 1)]), job) is not None


def test_an_operator_without_the_right_says_which_value_of_the_chart_grants_it() -> None:
    queue = read(cluster_with("v1beta2", refusal=NO_RIGHTS))
    assert "kueue.enabled=true" in queue.problem


def test_a_priority_class_that_does_not_exist_is_a_sentence(snapshot: SnapshotAssertion) -> None:
    job = a_job()
    job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "urgent"
    queue = read(cluster_with("v1beta2"), job)
    assert queue.problem.startswith("WorkloadPriorityClass urgent ")
    assert queue.problem == snapshot


def test_the_priority_of_the_pods_is_that_of_the_workload() -> None:
    cluster = cluster_with("v1beta2")
    cluster.put({"metadata": {"name": "high"}, "value": 7}, resource=PRIORITY_CLASSES)
    queue = read(cluster, a_job(**{"spec.trainer.priorityClassName": "high"}))
    assert queue.priority == Priority("scheduling.k8s.io", "high", 7)
    assert cluster.paths[-1] == "/apis/scheduling.k8s.io/v1/priorityclasses/high"


def test_topology_aware_placement_is_refused_in_words() -> None:
    assignment = {"name": "main", "topologyAssignment": {"levels": ["rack"]}}
    job = a_job()
    conditions = [{"type": "Admitted", "status": "True"}]
    status = {"admission": {"podSetAssignments": [assignment]}, "conditions": conditions}
    queue = read(cluster_with("v1beta2", workloads=[owned(job, status=status)]), job)
    assert "topology-aware scheduling" in queue.problem


def test_a_file_is_checked_for_what_only_a_queue_can_give(snapshot: SnapshotAssertion) -> None:
    slices = {"acceleratorType": "v5litepod-16", "provisioning": {"type": "Queued"}}
    body = job_body({"spec.slice": slices})
    with pytest.raises(BadInput) as caught:
        check(Path("job.yaml"), body)
    queue = caught.value
    check(Path("job.yaml"), job_body({"spec.slice": slices | {"hardware": "CPU"}}))
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    check(Path("job.yaml"), body)
    body["spec"]["trainer"]["podLabels"] = {"kueue.x-k8s.io/queue-name": "research"}
    with pytest.raises(BadInput) as caught:
        check(Path("job.yaml"), body)
    label = caught.value
    assert "kueue.x-k8s.io/queue-name" in str(label)
    assert [str(queue), str(label)] == snapshot


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            "v1beta2",
            {"priorityClassRef": {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "urgent"}},
        ),
        (
            "v1beta1",
            {"priorityClassName": "urgent", "priorityClassSource": "kueue.x-k8s.io/workloadpriorityclass"},
        ),
    ],
)
def test_a_workload_names_its_priority_as_its_version_does(version: str, said: Object) -> None:
    job = parse_job(job_body())
    queue = Queue("research", f"kueue.x-k8s.io/{version}", priority=Priority("kueue.x-k8s.io", "urgent", 1000))
    worker = {"spec": {"containers": [{"name": "trainer", "image": "i", "env": [{"name": "A"}]}]}}
    body = workload(job, resolve(job.spec), queue, worker)
    assert said.items() <= body["spec"].items()
    assert body["spec"]["priority"] == 1000
    assert "env" not in str(body), "a Workload says what is needed, not what runs"


def test_the_name_of_a_workload_is_a_label_value_and_the_jobs_own() -> None:
    names = {workload_name("j" * 48, uid) for uid in ("1", "2")} | {workload_name("k" * 48, "1")}
    assert len(names) == 3
    assert max(map(len, names)) <= 63


@pytest.mark.parametrize(
    ("wanted", "differ"),
    [({"zone": "b"}, True), ({"zone": "a"}, False), ({"disk": "ssd"}, False)],
    ids=str,
)
def test_a_value_that_differs_is_never_overwritten(
    wanted: dict[str, str], differ: bool, snapshot: SnapshotAssertion
) -> None:
    pod = {"metadata": {}, "spec": {"nodeSelector": {"zone": "a"}}}
    placement = PodSettings(node_selector={key: (value, "ResourceFlavor f") for key, value in wanted.items()})
    assert bool(conflicts(pod, placement)) is differ
    assert conflicts(pod, placement) == snapshot
    assert with_pod_settings(pod, placement)["spec"]["nodeSelector"]["zone"] == "a"


def test_a_toleration_of_two_flavors_and_of_the_job_is_there_once() -> None:
    toleration = {"key": "a", "operator": "Exists"}
    flavors = tuple({"metadata": {"name": name}, "spec": {"tolerations": [toleration]}} for name in "ab")
    placement = pod_settings(Queue("q", workload=Workload({"metadata": {}, "spec": {}}), flavors=flavors))
    pod = {"metadata": {}, "spec": {"tolerations": [toleration]}}
    assert with_pod_settings(pod, placement)["spec"]["tolerations"] == [toleration]


@pytest.mark.parametrize(
    ("before", "ready", "told"),
    [
        (None, False, ("False", "WaitForStart")),
        (("False", "WaitForStart"), True, ("True", "Started")),
        (("True", "Started"), False, ("False", "WaitForRecovery")),
        (("False", "WaitForRecovery"), False, None),
        (("False", "WaitForRecovery"), True, ("True", "Recovered")),
        (("True", "Recovered"), True, None),
        (("True", "Recovered"), False, ("False", "WaitForRecovery")),
    ],
)
def test_pods_ready_goes_through_kueues_four_reasons(
    before: tuple[str, str] | None, ready: bool, told: tuple[str, str] | None
) -> None:
    conditions = [] if before is None else [a_condition("PodsReady", *before)]
    body = found(conditions).with_pods_ready(ready, "2026-01-01T00:00:00Z")
    if told is None:
        assert body is None
    else:
        (condition,) = body["status"]["conditions"]
        assert (condition["status"], condition["reason"]) == told


@pytest.mark.parametrize(("reason", "requeued"), [("Preempted", "True"), ("PodsReadyTimeout", "False")])
def test_giving_quota_back_keeps_what_others_wrote(reason: str, requeued: str) -> None:
    conditions = [
        a_condition("QuotaReserved", "True", "QuotaReserved"),
        a_condition("Admitted", "True", "Admitted"),
        a_condition("Evicted", "True", reason),
        a_condition("Another", "True", "Unknown"),
    ]
    more = {"admission": {"clusterQueue": "c"}, "requeueState": {"count": 1}, "accumulatedPastExecutionTimeSeconds": 5}
    freed = Workload(found(conditions, **more).without_quota("2026-01-01T00:01:00Z"))
    assert not freed.holds_quota
    assert freed.condition("Requeued")["status"] == requeued
    assert freed.condition("Evicted") == conditions[2]
    assert freed.condition("Another") == conditions[3]
    assert freed.raw["status"]["requeueState"] == {"count": 1}
    assert freed.raw["status"]["accumulatedPastExecutionTimeSeconds"] == 65


def a_condition(kind: str, status: str, reason: str) -> Object:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": "2026-01-01T00:00:00Z"}


def found(conditions: list[Object], **status: Any) -> Workload:
    return Workload(
        {"metadata": {"name": "w", "generation": 2}, "spec": {}, "status": {"conditions": conditions, **status}}
    )
