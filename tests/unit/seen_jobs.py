"""Jobs as an API server shows them, at every stage of their life, at noon of one day. Used by the tests of `tpujob
watch`, `status` and `logs`."""

from typing import Any

from tests.unit.jobs import job_body
from tests.unit.pods import NOON, deleted, ended, pod, ready, time_at, with_status
from tpu_training_operator.api.job import Spec
from tpu_training_operator.cli.job_view import JobView, job_view
from tpu_training_operator.domain.hosts import host_of
from tpu_training_operator.domain.recipe.resolve import resolve

Object = dict[str, Any]

TRACEBACK = """Traceback (most recent call last):
  File "/app/digits.py", line 41, in task
    data = load(hp.path)
FileNotFoundError: [Errno 2] No such file or directory: '/data/digits.npz'"""

GIST = "FileNotFoundError: [Errno 2] No such file or directory: '/data/digits.npz' (digits.py:41)"


def condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {
        "type": kind,
        "status": status,
        "observedGeneration": 1,
        "lastTransitionTime": time_at(-60),
        "reason": reason,
        "message": message,
    }


def seen_job(
    state: str | None = "Running",
    message: str = "attempt 1: all 4 workers are ready",
    *,
    spec: Object | None = None,
    created: float = -600,
    also: tuple[Object, ...] = (),
    **status: Any,
) -> Object:
    """The digits job, created ten minutes before noon. `status`: further fields of it; `also`: further conditions."""
    body = job_body({f"spec.{path}": value for path, value in (spec or {}).items()})
    body["metadata"]["creationTimestamp"] = time_at(created)
    if state is None:
        return body
    resolved = resolve(Spec.model_validate(body["spec"])).resolved.as_json()
    is_ready = "True" if state in ("Running", "Succeeded", "Suspended") else "False"
    body["status"] = {
        "state": state,
        "attempt": 1,
        "conditions": [condition("Ready", is_ready, "Because", message), *also],
        "resolved": resolved,
        **status,
    }
    return body


def progress(step: int = 150, *, seconds_ago: float = 4, still: float = 4, **fields: Any) -> Object:
    return {
        "phase": "Training",
        "step": step,
        "totalSteps": 300,
        "examplesPerSecond": "3879.5",
        "loss": "0.0150698",
        "checkpointStep": 140,
        "lastReportTime": time_at(-seconds_ago),
        "lastAdvanceTime": time_at(-still),
        "estimatedRemainingSeconds": 130,
        **fields,
    }


def failure(kind: str, reason: str, message: str, *, code: int | None = None, attempt: int = 1) -> Object:
    return {
        "attempt": attempt,
        "pod": f"digits-{attempt}-0-2",
        "node": "node-1",
        "slice": 0,
        "host": 2,
        **({} if code is None else {"exitCode": code}),
        "class": kind,
        "reason": reason,
        "message": message,
        "time": time_at(-240),
    }


def goodput(activity: str, *, since: float = -60, **seconds: int) -> Object:
    """What was spent until `since`; the queue has the rest of the ten minutes."""
    spent = {f"{name}Seconds": value for name, value in seconds.items()}
    return {
        "queueSeconds": int(600 + since) - sum(seconds.values()),
        **spent,
        "activity": activity,
        "since": time_at(since),
    }


def view_of(job: Object, *pods: Object) -> JobView:
    hosts = [host for body in pods if (host := host_of(body)) is not None]
    return job_view(job, hosts, NOON)


def running_pods(count: int = 4, *, attempt: int = 1) -> list[Object]:
    return [ready(pod(host, attempt=attempt, node=f"node-{host % 2}")) for host in range(count)]


def unplaced(body: Object, message: str) -> Object:
    return with_status(
        body, conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
    )


def waiting(body: Object, reason: str, message: str = "") -> Object:
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return with_status(body, containerStatuses=[{"name": "trainer", "state": state}])


KILLED = failure("Infrastructure", "Killed", "the worker was killed (exit code 137)", code=137)

JOBS: dict[str, tuple[Object, list[Object]]] = {
    "not seen": (seen_job(None), []),
    "starting": (
        seen_job(
            "Starting",
            "attempt 1: waiting for 4 workers on v5litepod-16 to become ready",
            goodput=goodput("Queue", since=-600),
        ),
        [
            ready(pod(0, node="node-0")),
            waiting(pod(1, node="node-1"), "ContainerCreating"),
            unplaced(pod(2), "0/4 nodes are available: 4 Insufficient google.com/tpu."),
            unplaced(pod(3), "0/4 nodes are available: 4 Insufficient google.com/tpu."),
        ],
    ),
    "running": (
        seen_job(progress=progress(), goodput=goodput("Train", start=40, productive=300)),
        running_pods(),
    ),
    "no reports": (seen_job(goodput=goodput("Start", start=40)), running_pods()),
    "hung": (
        seen_job(
            progress=progress(still=400, warnings=["host 3 is 2.1 times slower than the others"]),
            goodput=goodput("Train", start=40, productive=300),
        ),
        running_pods(),
    ),
    "restarting": (
        seen_job(
            "Restarting",
            "attempt 3 starts now: slice 0 host 2 (digits-2-0-2 on node-1) failed with Infrastructure (Killed, exit"
            " code 137): the worker was killed (exit code 137)",
            attempt=3,
            progress=progress(phase=None),
            restarts={
                "byClass": {"Infrastructure": 2, "Preemption": 1},
                "charged": {"Infrastructure": [time_at(-200), time_at(-100)], "Preemption": [time_at(-90_000)]},
                "nextAttemptTime": time_at(7),
            },
            firstFailure=failure("Preemption", "NodeShutdown", "the node is shutting down"),
            lastFailure={**KILLED, "attempt": 2, "pod": "digits-2-0-2"},
            deviceFaults=[{"node": "node-1", "time": time_at(-240)}],
            avoidedNodes=["node-1"],
            goodput=goodput("Recovery", start=40, productive=300, wasted=20, recovery=30),
        ),
        [deleted(ready(pod(1, attempt=2, node="node-1")))],
    ),
    "suspended": (
        seen_job(
            "Suspended",
            "suspended by spec.runPolicy.suspend; no workers are running",
            progress=progress(),
            goodput=goodput("Suspended", start=40, productive=300),
        ),
        [],
    ),
    "blocked": (
        seen_job("Blocked", "Service digits exists and belongs to somebody else; delete it or rename the job"),
        [],
    ),
    "failed": (
        seen_job(
            "Failed",
            f"slice 0 host 2 (digits-1-0-2 on node-1) failed with UserError (exit code 1): {GIST};"
            " the restart limit for UserError is 0",
            also=(condition("Failed", "True", "NotRetryable", "not at all"),),
            firstFailure=failure("UserError", "UserError", TRACEBACK, code=1),
            lastFailure=failure("UserError", "UserError", TRACEBACK, code=1),
            goodput=goodput("Finished", since=-30, start=40),
        ),
        [ended(pod(2, node="node-1"), 1)],
    ),
    "succeeded": (
        seen_job(
            "Succeeded",
            "all 4 workers have finished",
            also=(condition("Succeeded", "True", "AllWorkersSucceeded", "all 4 workers have finished"),),
            progress=progress(
                300,
                phase="Done",
                checkpointStep=300,
                metrics={"loss": "0.0150698", "accuracy": "0.972222"},
                estimatedRemainingSeconds=None,
            ),
            goodput={**goodput("Finished", since=-30, start=40, productive=500), "ratio": "0.877"},
        ),
        [ended(pod(host, node="node-0")) for host in range(4)],
    ),
}


def large(accelerator_type: str, hosts: int) -> tuple[Object, list[Object]]:
    """A gang that starts: every fifth host still pulls its image, every seventh has no node."""
    job = seen_job(
        "Starting",
        f"attempt 1: waiting for {hosts} workers",
        spec={"slice": {"acceleratorType": accelerator_type}, "recipe.globalBatchSize": 18432},
        goodput=goodput("Start", start=40),
    )
    pods = []
    for host in range(hosts):
        body = pod(host, node=f"node-{host}")
        if host % 7 == 6:
            body = unplaced(pod(host), "0/2304 nodes are available")
        elif host % 5 == 4:
            body = waiting(body, "ContainerCreating")
        else:
            body = ready(body)
        pods.append(body)
    return job, pods
