"""Jobs as an API server shows them to `tpujob watch`, `status` and `logs`.

JOBS are written by the operator itself, in stories of the planner's tests. `seen_job` makes a job by hand, for what no
story can tell.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import one_pass
from tests.planner.story import (
    fails,
    finish,
    get_ready,
    given_a_created_gang,
    given_a_job,
    passes,
    some_passes,
)
from tests.unit.jobs import job_body
from tests.unit.pods import NOON, pod, ready, time_at, with_status
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.job import Spec
from tpu_training_operator.cli.watch.job_view import JobView, job_view
from tpu_training_operator.domain.cluster_state.hosts import host_of
from tpu_training_operator.domain.job.recipe.resolve import resolve

Object = dict[str, Any]

TRACEBACK = """Traceback (most recent call last):
  File "/app/digits.py", line 41, in task
    data = load(hp.path)
FileNotFoundError: [Errno 2] No such file or directory: '/data/digits.npz'"""

NO_NODE = "0/4 nodes are available: 4 Insufficient google.com/tpu."


@dataclass(frozen=True)
class Seen:
    job: Object
    pods: list[Object]
    now: datetime

    @property
    def bodies(self) -> list[Object]:
        return [self.job, *self.pods]

    def view(self, *, seconds_later: float = 0) -> JobView:
        return job_view(self.job, _hosts(self.pods), self.now + timedelta(seconds=seconds_later))


def view_of(job: Object, *pods: Object) -> JobView:
    """At noon, to which the jobs made by hand belong."""
    return job_view(job, _hosts(pods), NOON)


def _hosts(pods: Any) -> list[Any]:
    return [host for body in pods if (host := host_of(body)) is not None]


# What pods say


def unschedulable(message: str) -> Object:
    return {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}


def waiting_status(reason: str, message: str = "") -> Object:
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {"containerStatuses": [{"name": "trainer", "state": state}]}


# Stories


def starting() -> ModelCluster:
    cluster = given_a_created_gang()
    passes(cluster, 20)
    first, second, *others = cluster.pods.values()
    kubelet.make_ready(cluster, first)
    kubelet.place(cluster, second, "node-1")
    second["status"] |= waiting_status("ContainerCreating")
    for body in others:
        body["status"]["conditions"] = [unschedulable(NO_NODE)]
    passes(cluster, 570)
    for _ in range(3):
        one_pass(cluster)
    return cluster


def started() -> ModelCluster:
    cluster = given_a_created_gang(
        {"spec.checkpoint": {"uri": "gs://bucket/digits", "everySteps": 20}, "metadata.labels": {}}, listens=True
    )
    passes(cluster, 30)
    for index, body in enumerate(cluster.pods.values()):
        kubelet.place(cluster, body, f"node-{index % 2}")
    passes(cluster, 40)
    get_ready(cluster)
    return cluster


def running(**fields: Any) -> ModelCluster:
    cluster = started()
    passes(cluster, 60)
    kubelet.report(cluster, 1)
    one_pass(cluster)
    passes(cluster, 300)
    reports(cluster, 150, estimated_remaining_seconds=130, **fields)
    passes(cluster, 4)
    return cluster


def reports(cluster: ModelCluster, step: int, phase: ReportPhase = ReportPhase.TRAINING, **fields: Any) -> None:
    numbers = {"total_steps": 300, "examples_per_second": "3879.5", "loss": "0.0150698"}
    kubelet.report(cluster, step, phase, checkpoint_step=step // 20 * 20, **numbers, **fields)
    one_pass(cluster)


def hung() -> ModelCluster:
    cluster = running()
    passes(cluster, 400)
    reports(cluster, 150, warnings=("host 3 is 2.1 times slower than the others",))
    return cluster


def restarting() -> ModelCluster:
    """Preempted once, killed twice: the third attempt waits, and one worker of the second still stops."""
    cluster = running()
    fails(cluster, "digits-1-0-2", 75)
    runs_again(cluster)
    reports(cluster, 155)
    for attempt in (2, 3):
        fails(cluster, f"digits-{attempt}-0-2")
        if attempt == 2:
            runs_again(cluster)
    for _ in range(2):
        one_pass(cluster)
    cluster.now += timedelta(seconds=1)
    return cluster


def runs_again(cluster: ModelCluster) -> None:
    some_passes(cluster, 3, seconds=60)
    for index, body in enumerate(cluster.pods.values()):
        kubelet.place(cluster, body, f"node-{index % 2}")
    get_ready(cluster)


def suspended() -> ModelCluster:
    cluster = running()
    cluster.edit_run_policy(suspend=True)
    some_passes(cluster, 3)
    passes(cluster, 60)
    return cluster


def blocked() -> ModelCluster:
    cluster = given_a_job()
    cluster.others["Service/digits"] = {"kind": "Service", "metadata": {"name": "digits", "uid": "somebody else's"}}
    for _ in range(3):
        one_pass(cluster)
    return cluster


def failed() -> ModelCluster:
    cluster = started()
    passes(cluster, 30)
    fails(cluster, "digits-1-0-2", 1, message=TRACEBACK)
    some_passes(cluster, 3, seconds=30)
    return cluster


def succeeded() -> ModelCluster:
    cluster = running()
    reports(cluster, 300, ReportPhase.DONE, metrics={"loss": "0.0150698", "accuracy": "0.972222"})
    finish(cluster)
    passes(cluster, 30)
    return cluster


V5P_OR_V6E = {
    "spec.slice": {"acceleratorType": "v5p-32"},
    "spec.placement": {
        "alternatives": [{"slice": {"acceleratorType": "v6e-16"}, "waitForPreviousSeconds": 600}],
        "returnToPreferred": "AtCheckpoint",
    },
    "spec.checkpoint": {"uri": "gs://bucket/jobs", "everySteps": 20},
}


def moved() -> ModelCluster:
    """Three times: v5p is full, then free, then lost."""
    cluster = given_a_created_gang(V5P_OR_V6E, listens=True)
    passes(cluster, 600)
    begins_elsewhere(cluster)
    reports(cluster, 60)
    passes(cluster, 1800)
    reports(cluster, 120)
    for body in list(cluster.pods.values()):
        if "hold" in body["metadata"]["name"]:
            kubelet.make_ready(cluster, body)
    begins_elsewhere(cluster)
    reports(cluster, 130)
    passes(cluster, 300)
    reports(cluster, 200)
    for body in list(cluster.pods.values()):
        kubelet.lose_node_for_good(cluster, body)
    one_pass(cluster)
    cluster.pods.clear()
    one_pass(cluster)
    passes(cluster, 600)
    begins_elsewhere(cluster)
    reports(cluster, 210)
    passes(cluster, 60)
    reports(cluster, 215)
    return cluster


def begins_elsewhere(cluster: ModelCluster) -> None:
    """The old workers stop, and new ones find nodes and become ready."""
    some_passes(cluster, 5, seconds=10)
    for index, body in enumerate(cluster.pods.values()):
        kubelet.place(cluster, body, f"{cluster.job['status']['placement']['slice']}-{cluster.status.attempt}-{index}")
    get_ready(cluster)


def _seen(story: Callable[[], ModelCluster]) -> Seen:
    cluster = story()
    return Seen(cluster.job, list(cluster.pods.values()), cluster.now)


JOBS: dict[str, Seen] = {
    "not seen": _seen(given_a_job),
    "starting": _seen(starting),
    "running": _seen(running),
    "no reports": _seen(started),
    "hung": _seen(hung),
    "restarting": _seen(restarting),
    "suspended": _seen(suspended),
    "blocked": _seen(blocked),
    "failed": _seen(failed),
    "succeeded": _seen(succeeded),
    "moved": _seen(moved),
}


# By hand


def seen_job(
    state: str = "Running", *, spec: Object | None = None, also: tuple[Object, ...] = (), **status: Any
) -> Object:
    """The digits job, created ten minutes before noon. `status`: further fields of it; `also`: further conditions."""
    body = job_body({f"spec.{path}": value for path, value in (spec or {}).items()})
    body["metadata"]["creationTimestamp"] = time_at(-600)
    body["status"] = {
        "state": state,
        "attempt": 1,
        "conditions": [condition("Ready", "True", "Because", "attempt 1: all 4 workers are ready"), *also],
        "resolved": resolve(Spec.model_validate(body["spec"])).resolved.as_json(),
        **status,
    }
    return body


def condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {
        "type": kind,
        "status": status,
        "observedGeneration": 1,
        "lastTransitionTime": time_at(-60),
        "reason": reason,
        "message": message,
    }


def progress(step: int) -> Object:
    return {"phase": "Training", "step": step, "totalSteps": 300, "lastReportTime": time_at(-4)}


def running_pods() -> list[Object]:
    return [ready(pod(host, node=f"node-{host % 2}")) for host in range(4)]


def waiting(body: Object, reason: str, message: str = "") -> Object:
    return with_status(body, **waiting_status(reason, message))


def large(accelerator_type: str, hosts: int) -> tuple[Object, list[Object]]:
    """A gang that starts: every fifth host still pulls its image, every seventh has no node."""
    job = seen_job("Starting", spec={"slice": {"acceleratorType": accelerator_type}, "recipe.globalBatchSize": 18432})
    pods = []
    for host in range(hosts):
        body = pod(host, node=f"node-{host}")
        if host % 7 == 6:
            body = with_status(pod(host), conditions=[unschedulable("0/2304 nodes are available")])
        elif host % 5 == 4:
            body = waiting(body, "ContainerCreating")
        else:
            body = ready(body)
        pods.append(body)
    return job, pods
