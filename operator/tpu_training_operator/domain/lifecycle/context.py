"""One look at a valid, unfinished job, and how its status is written down.."""

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import count

from tpu_training_operator.api.conditions import ConditionType, Reason, find, is_true
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.status import Activity, Goodput, Status
from tpu_training_operator.domain.lifecycle import goodput as accounts
from tpu_training_operator.domain.lifecycle.conditions import Picture, mark, present
from tpu_training_operator.domain.naming import WorkerId, workers
from tpu_training_operator.domain.observed import Observed, WorkerPod, format_time
from tpu_training_operator.domain.recipe.resolve import Resolution
from tpu_training_operator.domain.report import Reporting


@dataclass(frozen=True)
class Situation:
    """`status`: what stands in the job, with what its workers have reported since."""

    job: TPUTrainingJob
    resolution: Resolution
    status: Status
    observed: Observed
    now: datetime
    reporting: Reporting | None

    @property
    def attempt(self) -> int:
        return self.status.attempt

    @cached_property
    def next_attempt(self) -> int:
        """The first number that no pod has: workers are created after their attempt's number is in the status, so one
        that is there already is nobody's."""
        taken = {pod.worker.attempt for pod in self.observed.pods}
        return next(number for number in count(self.attempt + 1) if number not in taken)

    @cached_property
    def pods(self) -> list[WorkerPod]:
        """The workers of the present attempt."""
        return self.observed.of_attempt(self.attempt)

    @cached_property
    def leftovers(self) -> list[WorkerPod]:
        """The workers of earlier attempts, but for the one whose log is kept."""
        return [pod for pod in self.observed.before_attempt(self.attempt) if not self._is_kept(pod)]

    def _is_kept(self, pod: WorkerPod) -> bool:
        """Whether it is the worker that failed last. What has ended holds no chips, and its log says why it failed. A
        quota may count it all the same, so it goes where a quota refuses a worker."""
        failure = self.status.last_failure
        if failure is None or pod.name != failure.pod or not pod.has_ended or pod.is_terminating:
            return False
        stalled = find(self.status.conditions, ConditionType.STALLED)
        return stalled is None or stalled.reason != Reason.FORBIDDEN

    @cached_property
    def missing(self) -> list[WorkerId]:
        present_workers = {pod.worker for pod in self.pods}
        return [w for w in workers(self.resolution.layout, self.attempt) if w not in present_workers]

    @property
    def is_running(self) -> bool:
        return is_true(self.status.conditions, ConditionType.GANG_READY)

    @property
    def is_refused(self) -> bool:
        """What the last pass wanted to create was refused."""
        ready = find(self.status.conditions, ConditionType.READY)
        waits = ready is not None and ready.reason == Reason.WAITING_FOR_DELETED_JOB
        return waits or is_true(self.status.conditions, ConditionType.STALLED)

    @property
    def reports(self) -> bool:
        """Whether the gang will say when it trains: it runs our trainer, and somebody listens."""
        return self.reporting is not None and self.job.spec.trainer.entrypoint is not None

    def goodput(self, until: datetime | None = None) -> Goodput:
        """Settled up to then, or up to now."""
        given = self.status.goodput or accounts.born(self.job.metadata.get("creationTimestamp", format_time(self.now)))
        return accounts.settle(given, [] if self.missing else self.pods, until or self.now)

    def goodput_at_end(self, until: datetime) -> Goodput:
        """Of an attempt that ends: what ran without a word has trained."""
        heard = self.status.progress is not None and self.status.progress.phase is not None
        given = self.status.goodput
        if given is None or not self.is_running or heard:
            return self.goodput(until)
        return accounts.charge(replace(given, activity=Activity.TRAIN), until, Activity.TRAIN)

    def present(self, status: Status, picture: Picture) -> Status:
        return present(status, picture, self.job.generation, self.now)

    def mark(self, status: Status, kind: ConditionType, value: bool, reason: Reason, message: str) -> Status:
        return mark(status, kind, value, reason, message, self.job.generation, self.now)

    def finish(self, status: Status, picture: Picture) -> Status:
        """The status of a job that will not change any more. It ends when its account does: a clock that was set back
        ends nothing before what has been."""
        status = self.mark(status, ConditionType.GANG_READY, False, picture.reason, picture.message)
        goodput = accounts.charge(status.goodput or self.goodput(), self.now, Activity.FINISHED)
        return self.present(replace(status, completion_time=goodput.since, goodput=goodput, avoided_nodes=[]), picture)
