"""One look at a job that is valid and has not finished: everything its planner decides by."""

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import count

from tpu_training_operator.api.conditions import ConditionType, Reason, find, is_true
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.status import Activity, Goodput
from tpu_training_operator.domain.lifecycle.conditions import Snapshot
from tpu_training_operator.domain.lifecycle.goodput import charge, lost, new_goodput, saved, settle
from tpu_training_operator.domain.naming import WorkerId, workers
from tpu_training_operator.domain.observed import WorkerPod, format_time
from tpu_training_operator.domain.recipe.resolve import Resolution
from tpu_training_operator.domain.report import Reporting
from tpu_training_operator.domain.workload import Queue


@dataclass(frozen=True)
class Context(Snapshot):
    """`status`: the stored status, with what the workers have reported since."""

    job: TPUTrainingJob
    resolution: Resolution
    reporting: Reporting | None

    @cached_property
    def next_attempt(self) -> int:
        """The next number that no pod has. Workers are created after their attempt is in the status, so a pod with a
        later number is not the operator's."""
        taken = {pod.worker.attempt for pod in self.observed.pods}
        return next(number for number in count(self.attempt + 1) if number not in taken)

    @cached_property
    def pods(self) -> list[WorkerPod]:
        """The workers of the current attempt."""
        return self.observed.of_attempt(self.attempt)

    @cached_property
    def leftovers(self) -> list[WorkerPod]:
        """The workers of earlier attempts, except the one whose log is kept."""
        return [pod for pod in self.observed.before_attempt(self.attempt) if not self._is_kept(pod)]

    def _is_kept(self, pod: WorkerPod) -> bool:
        """Whether it is the worker that failed last: its log says why, and a pod that has ended holds no chips. But a
        quota may count it, so it is deleted if a quota refuses a worker."""
        failure = self.status.last_failure
        if failure is None or pod.name != failure.pod or not pod.has_ended or pod.is_terminating:
            return False
        stalled = find(self.status.conditions, ConditionType.STALLED)
        return stalled is None or stalled.reason != Reason.FORBIDDEN

    @cached_property
    def missing(self) -> list[WorkerId]:
        """The workers of the current attempt that have no pod."""
        there = {pod.worker for pod in self.pods}
        return [worker for worker in workers(self.resolution.layout, self.attempt) if worker not in there]

    @property
    def queue(self) -> Queue | None:
        return self.observed.queue

    @property
    def all_workers(self) -> list[WorkerPod]:
        """Of the current attempt and of earlier ones."""
        return [*self.observed.before_attempt(self.attempt), *self.pods]

    @property
    def is_running(self) -> bool:
        return is_true(self.status.conditions, ConditionType.GANG_READY)

    @property
    def is_refused(self) -> bool:
        """Whether the cluster refused what the last pass wanted to create."""
        ready = find(self.status.conditions, ConditionType.READY)
        waits = ready is not None and ready.reason == Reason.WAITING_FOR_DELETED_JOB
        return waits or is_true(self.status.conditions, ConditionType.STALLED)

    @property
    def reports(self) -> bool:
        """Whether the gang will report its progress: it runs our trainer, and the operator listens."""
        return self.reporting is not None and self.job.spec.trainer.entrypoint is not None

    @property
    def was_heard(self) -> bool:
        """Whether a worker of the current attempt has reported."""
        return self.status.progress is not None and self.status.progress.phase is not None

    def goodput_of_stopped(self) -> Goodput | None:
        """The goodput of an attempt that a suspension or Kueue has stopped. A worker that reports its checkpoints has
        saved only what came before the last of them; a trainer that cannot report saves before it stops."""
        goodput, progress = self.status.goodput, self.status.progress
        if goodput is None:
            return None
        reports_checkpoints = self.reports or (progress is not None and progress.checkpoint_step is not None)
        if self.job.spec.checkpoint is None or (self.was_heard and reports_checkpoints):
            return lost(goodput)
        return saved(goodput)

    def settled_goodput(self, until: datetime | None = None) -> Goodput:
        """The goodput up to `until`, by default up to now."""
        created = self.job.metadata.get("creationTimestamp", format_time(self.now))
        return settle(self.status.goodput or new_goodput(created), [] if self.missing else self.pods, until or self.now)

    def goodput_at_end(self, until: datetime) -> Goodput:
        """The goodput of an attempt that ends. A gang that ran and never reported counts as having trained."""
        given = self.status.goodput
        if given is None or not self.is_running or self.was_heard:
            return self.settled_goodput(until)
        return charge(replace(given, activity=Activity.TRAIN), until, Activity.TRAIN)
