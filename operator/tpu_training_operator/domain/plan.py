"""The planner: what to do next about one job. Called by `runtime.reconciler` after every hint and every resync.

The attempt protocol. An attempt exists once `status.attempt` says so: the number is raised, with the job's
resourceVersion as precondition, in a pass that does nothing else. Later passes converge the pods to it: workers of
another attempt are deleted, and only when they are gone the attempt's own are created. A crash between any two
effects leaves a state that the next pass continues from, and of two operators only one can raise the number.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, Reason, is_true
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.status import Failure, State, Status
from tpu_training_operator.api.validation import InvalidJob, parse_job
from tpu_training_operator.domain.actions import Create, DeleteConfigMap, DeletePod, Event, Plan
from tpu_training_operator.domain.failures import SETTLE, first_failure, missing_worker
from tpu_training_operator.domain.gang import config_map, service
from tpu_training_operator.domain.naming import WorkerId, config_map_name, workers
from tpu_training_operator.domain.observed import Observed, WorkerPod, format_time, parse_time
from tpu_training_operator.domain.outcome import final_progress
from tpu_training_operator.domain.picture import Kind, Picture, mark, present
from tpu_training_operator.domain.placement import PartlyPlaced, partly_placed, pause_after_release
from tpu_training_operator.domain.resolve import Resolution, resolve
from tpu_training_operator.domain.restart_policy import backoff, may_restart
from tpu_training_operator.domain.worker_pod import worker_pod

_SOON = timedelta(seconds=1)
_AT_ONCE = timedelta(0)


def plan(observed: Observed, now: datetime) -> Plan:
    """The next actions and the status to write. The same arguments give the same plan."""
    status = Status.model_validate(observed.job.get("status") or {})
    if "deletionTimestamp" in observed.job["metadata"]:
        # Everything the job owns goes with it, by its owner references.
        return Plan()
    if is_true(status.conditions, ConditionType.SUCCEEDED) or is_true(status.conditions, ConditionType.FAILED):
        leftovers = _deletions(pod for pod in observed.pods if not pod.has_ended)
        return _noting_generation(Plan(stages=leftovers), status, observed)
    try:
        job = parse_job(observed.job)
        resolution = resolve(job.spec)
    except InvalidJob as error:
        return _invalid(observed, status, error, now)
    return _Pass(job, resolution, status, observed, now).plan()


def _invalid(observed: Observed, status: Status, error: InvalidJob, now: datetime) -> Plan:
    picture = Picture(State.INVALID, Kind.STUCK, Reason.INVALID_SPEC, str(error))
    return Plan(status=present(status, picture, observed.job["metadata"].get("generation", 1), now))


def _noting_generation(decided: Plan, status: Status, observed: Observed) -> Plan:
    """The plan, with a status where only the generation is new: a change of a restart limit asks for nothing else,
    but as long as it is not observed, kstatus takes the job for one in progress."""
    generation = observed.job["metadata"].get("generation", 1)
    if decided.status is not None or status.observed_generation == generation:
        return decided
    return replace(decided, status=status.model_copy(update={"observed_generation": generation}))


def _deletions(pods: Iterable[WorkerPod]) -> tuple[tuple[DeletePod, ...], ...]:
    return (tuple(DeletePod(pod.name, pod.uid) for pod in pods if not pod.is_terminating),)


@dataclass(frozen=True)
class _Pass:
    """One look at a valid, unfinished job: the cases, in the order in which they are decided."""

    job: TPUTrainingJob
    resolution: Resolution
    status: Status
    observed: Observed
    now: datetime

    def plan(self) -> Plan:
        if any(pod.worker.attempt > self.status.attempt for pod in self.observed.pods):
            # Another operator has moved on: what we read is old, and nothing may rest on it.
            return Plan(again=_SOON)
        return _noting_generation(self._next(), self.status, self.observed)

    def _next(self) -> Plan:
        attempt = self.status.attempt
        if self.job.spec.run_policy.suspend:
            return self._suspend()
        if attempt == 0 or is_true(self.status.conditions, ConditionType.SUSPENDED):
            return self._begin()
        if leftovers := self.observed.not_of_attempt(attempt):
            return Plan(stages=_deletions(leftovers))
        pods = self.observed.of_attempt(attempt)
        if failure := self._failure(pods):
            return self._fail_or_restart(failure)
        if self._missing(pods):
            return self._create_missing(pods)
        if all(pod.phase == "Succeeded" for pod in pods):
            return self._succeed(pods)
        return self._watch(pods)

    def _begin(self) -> Plan:
        """The first attempt, or the one after a suspension: charged to no failure class."""
        attempt = self.status.attempt + 1
        status = self.status.model_copy(
            update={
                "attempt": attempt,
                "resolved": self.resolution.resolved,
                "start_time": self.status.start_time or format_time(self.now),
            }
        )
        picture = self._starting(attempt)
        if is_true(status.conditions, ConditionType.SUSPENDED):
            status = self._mark(status, ConditionType.SUSPENDED, False, Reason.RESUMED, "suspend is off")
        status = self._mark(status, ConditionType.GANG_READY, False, picture.reason, picture.message)
        return Plan(
            status=self._present(status, picture),
            events=(Event("AttemptStarted", picture.message),),
            again=_AT_ONCE,
        )

    def _starting(self, attempt: int) -> Picture:
        layout = self.resolution.layout
        message = f"attempt {attempt}: waiting for {layout.hosts} workers on {layout} to become ready"
        return Picture(State.STARTING, Kind.IN_PROGRESS, Reason.WAITING_FOR_WORKERS, message)

    def _suspend(self) -> Plan:
        message = "suspended by spec.runPolicy.suspend; no workers are kept"
        picture = Picture(State.SUSPENDED, Kind.SETTLED, Reason.SUSPENDED, message)
        if self.observed.pods:
            message = f"waiting for {len(self.observed.pods)} workers to stop"
            picture = Picture(State.SUSPENDED, Kind.IN_PROGRESS, Reason.SUSPENDED, message)
        status = self._mark(self.status, ConditionType.SUSPENDED, True, Reason.SUSPENDED, "suspend is on")
        if status.attempt:
            status = self._mark(status, ConditionType.GANG_READY, False, Reason.SUSPENDED, "suspend is on")
        return Plan(stages=_deletions(self.observed.pods), status=self._present(status, picture))

    def _failure(self, pods: list[WorkerPod]) -> Failure | None:
        if failure := first_failure(pods, self.status.attempt, self.now):
            return failure
        missing = self._missing(pods)
        if missing and is_true(self.status.conditions, ConditionType.GANG_READY):
            # A new worker could not join a training that runs: its peers have met without it.
            worker = missing[0]
            name = worker.pod_name(self.job.name)
            return missing_worker(name, worker.slice, worker.host, self.status.attempt, self.now)
        return None

    def _fail_or_restart(self, failure: Failure) -> Plan:
        status = self.status.model_copy(
            update={"first_failure": self.status.first_failure or failure, "last_failure": failure}
        )
        what = _describe(failure)
        if not may_restart(self.job.spec.run_policy, status.restarts, failure.failure_class):
            return self._fail(status, failure, what)
        attempt = status.attempt + 1
        wait = backoff(self.job.spec.run_policy, status.restarts)
        by_class = dict(status.restarts.by_class)
        by_class[failure.failure_class] = by_class.get(failure.failure_class, 0) + 1
        restarts = status.restarts.model_copy(
            update={"by_class": by_class, "next_attempt_time": format_time(self.now + wait)}
        )
        status = status.model_copy(update={"attempt": attempt, "restarts": restarts})
        message = f"attempt {attempt} follows: {what}"
        picture = Picture(State.RESTARTING, Kind.IN_PROGRESS, Reason.REPLACING_WORKERS, message)
        status = self._mark(status, ConditionType.GANG_READY, False, Reason.REPLACING_WORKERS, message)
        return Plan(
            status=self._present(status, picture),
            events=(Event("Restarting", message, warning=True),),
            again=_AT_ONCE,
        )

    def _fail(self, status: Status, failure: Failure, what: str) -> Plan:
        limit = self.job.spec.run_policy.restart.limits.of(failure.failure_class)
        message = f"{what}; {failure.failure_class} may restart the gang {limit} times"
        picture = Picture(State.FAILED, Kind.STUCK, Reason.RESTART_LIMIT_REACHED, message)
        status = self._mark(status, ConditionType.FAILED, True, picture.reason, message)
        return Plan(
            status=self._finish(self._present(status, picture), picture),
            events=(Event("Failed", message, warning=True),),
            again=_AT_ONCE,
        )

    def _release(self, part: PartlyPlaced) -> Plan:
        """The next attempt, after a pause in which another gang may take the nodes: charged to no failure class."""
        attempt, policy = self.status.attempt, self.job.spec.run_policy
        pause = pause_after_release(policy, self.job.uid, attempt)
        message = (
            f"attempt {attempt + 1} follows in {pause.total_seconds():.0f} s: {part.waiting} of {part.workers} workers"
            f" found no node within {policy.start_deadline_seconds} s, and the others give theirs back"
        )
        picture = Picture(State.RESTARTING, Kind.IN_PROGRESS, Reason.PARTLY_PLACED, message)
        restarts = self.status.restarts.model_copy(update={"next_attempt_time": format_time(self.now + pause)})
        status = self.status.model_copy(update={"attempt": attempt + 1, "restarts": restarts})
        status = self._mark(status, ConditionType.GANG_READY, False, picture.reason, message)
        return Plan(
            status=self._present(status, picture),
            events=(Event("Released", message, warning=True),),
            again=_AT_ONCE,
        )

    def _create_missing(self, pods: list[WorkerPod]) -> Plan:
        earliest = self.status.restarts.next_attempt_time
        if earliest and self.now < parse_time(earliest):
            return Plan(again=parse_time(earliest) - self.now)
        attempt = self.status.attempt
        shared = (
            Create(service(self.job)),
            Create(config_map(self.job, self.resolution, attempt)),
            *((DeleteConfigMap(config_map_name(self.job.name, attempt - 1)),) if attempt > 1 else ()),
        )
        missing = tuple(Create(worker_pod(self.job, self.resolution, worker)) for worker in self._missing(pods))
        return Plan(stages=(shared, missing))

    def _succeed(self, pods: list[WorkerPod]) -> Plan:
        message = f"all {len(pods)} workers have finished"
        picture = Picture(State.SUCCEEDED, Kind.SETTLED, Reason.ALL_WORKERS_SUCCEEDED, message)
        progress = final_progress(pods[0], self.resolution.recipe.train_steps)
        status = self.status.model_copy(update={"progress": progress or self.status.progress})
        status = self._mark(status, ConditionType.SUCCEEDED, True, picture.reason, message)
        return Plan(
            status=self._finish(self._present(status, picture), picture),
            events=(Event("Succeeded", message),),
        )

    def _watch(self, pods: list[WorkerPod]) -> Plan:
        again = SETTLE if any(pod.phase == "Failed" for pod in pods) else None
        stalled = is_true(self.status.conditions, ConditionType.STALLED)
        if not all(pod.is_ready or pod.phase == "Succeeded" for pod in pods):
            if part := partly_placed(pods, self.job.spec.run_policy):
                if self.now >= part.deadline:
                    return self._release(part)
                left = part.deadline - self.now
                again = min(again, left) if again else left
            # A gang that starts is shown as such already, unless something stood in its way meanwhile.
            freed = self.status if stalled else None
            return Plan(status=freed and self._present(freed, self._starting(self.status.attempt)), again=again)
        if is_true(self.status.conditions, ConditionType.GANG_READY) and not stalled:
            return Plan(again=again)
        message = f"attempt {self.status.attempt}: all {len(pods)} workers are ready"
        picture = Picture(State.RUNNING, Kind.SETTLED, Reason.ALL_WORKERS_READY, message)
        status = self._mark(self.status, ConditionType.GANG_READY, True, picture.reason, message)
        return Plan(status=self._present(status, picture), again=again)

    def _missing(self, pods: list[WorkerPod]) -> list[WorkerId]:
        present_workers = {pod.worker for pod in pods}
        expected = workers(self.resolution.layout, self.status.attempt)
        return [worker for worker in expected if worker not in present_workers]

    def _finish(self, status: Status, picture: Picture) -> Status:
        status = self._mark(status, ConditionType.GANG_READY, False, picture.reason, picture.message)
        return status.model_copy(update={"completion_time": format_time(self.now)})

    def _present(self, status: Status, picture: Picture) -> Status:
        return present(status, picture, self.job.generation, self.now)

    def _mark(self, status: Status, kind: ConditionType, value: bool, reason: Reason, message: str) -> Status:
        return mark(status, kind, value, reason, message, self.job.generation, self.now)


def _describe(failure: Failure) -> str:
    code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
    node = f" on {failure.node}" if failure.node else ""
    return (
        f"slice {failure.slice} host {failure.host} ({failure.pod}{node}) failed with"
        f" {failure.failure_class} ({failure.reason}{code}): {failure.message}"
    )
