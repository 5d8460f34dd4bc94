"""A valid, unfinished job as one pass finds it: everything that the planner's decisions rest on."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import count

from tpu_training_operator.api.conditions import ConditionType, Reason, find, is_true
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Activity, Goodput
from tpu_training_operator.domain.cluster_state.observed import EntryCheckPod, WorkerPod, format_time, parse_time
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.cluster_state.workload import Queue, workload_name
from tpu_training_operator.domain.job.naming import WorkerId, workers
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.rungs import Rung
from tpu_training_operator.domain.objects.actions import Create
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy
from tpu_training_operator.domain.plan.common.accounts import (
    Holding,
    mark_lost,
    mark_saved,
    read_holding,
    settle,
    start_goodput,
)
from tpu_training_operator.domain.plan.common.conditions import JobState
from tpu_training_operator.domain.plan.plan import Freshness

# How long to wait until a failed worker is reported as ended, so that its log can be kept.
_LAST_MOMENT = timedelta(seconds=10)


@dataclass(frozen=True)
class Context(JobState):
    """`status`: the stored status, with what the workers have reported since. `options`: all slices that the job may
    run on, in order of preference; `option`: the one that its attempt runs on. `lower_rungs`: the rungs of its ladder
    below the job itself; `rung`: where it is on the ladder, None without one."""

    options: tuple[SliceOption, ...]
    option: SliceOption
    reporting: Reporting | None = None
    network_policy: WorkerNetworkPolicy | None = None
    package_index: bool = True
    lower_rungs: tuple[SliceOption, ...] = ()
    rung: Rung | None = None

    @property
    def job(self) -> TPUTrainingJob:
        """The job, with the slice of its attempt as its spec.slice."""
        return self.option.job

    @property
    def resolution(self) -> Resolution:
        return self.option.resolution

    @cached_property
    def next_attempt(self) -> int:
        """The next number that no pod has. Workers are created after their attempt is in the status, so a pod with a
        later number is not the operator's."""
        taken = {pod.worker.attempt for pod in self.observed.pods}
        return next(number for number in count(self.attempt + 1) if number not in taken)

    @cached_property
    def pods(self) -> list[WorkerPod]:
        """The workers of the current attempt."""
        has = self.resolution.layout.has
        return [pod for pod in self.observed.of_attempt(self.attempt) if has(pod.worker.slice, pod.worker.host)]

    @cached_property
    def leftovers(self) -> list[WorkerPod]:
        """The workers of earlier attempts, except the one whose log is kept; and the entry check's pod, once it is of
        no use."""
        earlier = [pod for pod in self.observed.before_attempt(self.attempt) if not self._is_kept(pod)]
        return [*self.idle_entry_check, *earlier]

    @property
    def is_checking(self) -> bool:
        """Returns whether the entry check has begun and is not over."""
        checked = find(self.status.conditions, ConditionType.ENTRY_CHECK_PASSED)
        return checked is not None and checked.status == "Unknown"

    @property
    def idle_entry_check(self) -> list[WorkerPod]:
        """The entry check's pod, unless something waits for it or it is kept for its log. A quota may count it."""
        pod = self.observed.entry_check_pod
        if pod is None or self.is_checking:
            return []
        return [] if pod.has_ended and self._has_wanted_log(pod) else [pod]

    def _has_wanted_log(self, pod: WorkerPod) -> bool:
        """Returns whether the pod is kept for its log once it has ended: the worker that failed last, or the entry
        check. A pod that has ended holds no chips, but a quota may count it, so it is deleted if a quota refuses a
        worker."""
        if isinstance(pod, EntryCheckPod):
            checked = find(self.status.conditions, ConditionType.ENTRY_CHECK_PASSED)
            is_wanted = checked is not None and not self.is_checking
        else:
            failure = self.status.last_failure
            is_wanted = failure is not None and pod.name == failure.pod
        return is_wanted and not self._is_out_of_quota

    def _is_kept(self, pod: WorkerPod) -> bool:
        """Returns whether the pod is the worker that failed last, and has ended or is about to."""
        failure = self.status.last_failure
        if failure is None or pod.is_terminating or not self._has_wanted_log(pod):
            return False
        return pod.has_ended or (pod.is_about_to_end and self.now < parse_time(failure.time) + _LAST_MOMENT)

    def reads_to_delete(self, pods: Sequence[WorkerPod]) -> Freshness:
        """Returns the reads that a deletion of these pods must rest on. One that is kept once it has ended may have
        ended since an old read."""
        may_have_ended = (pod for pod in pods if not pod.has_ended and not pod.is_terminating)
        return Freshness.FRESH_PODS if any(map(self._has_wanted_log, may_have_ended)) else Freshness.CACHED

    @property
    def awaits_last_failure(self) -> bool:
        """Returns whether the worker that is kept for its log still holds its chips."""
        earlier = self.observed.before_attempt(self.attempt)
        return any(self._is_kept(pod) and not pod.has_ended for pod in earlier)

    @property
    def _is_out_of_quota(self) -> bool:
        stalled = find(self.status.conditions, ConditionType.STALLED)
        return stalled is not None and stalled.reason == Reason.NOT_PERMITTED

    @cached_property
    def missing(self) -> list[WorkerId]:
        """The workers of the current attempt that have no pod."""
        there = {pod.worker for pod in self.pods}
        return [worker for worker in workers(self.resolution.layout, self.attempt) if worker not in there]

    @property
    def may_have_workers(self) -> bool:
        """Returns whether the attempt should have workers: it has begun, and nothing has stopped it since."""
        return self.attempt > 0 and not self.is_suspended and not self.is_held

    @property
    def has_alternatives(self) -> bool:
        return len(self.options) > 1

    @property
    def is_on_lower_rung(self) -> bool:
        return self.resolution.lower_rung is not None

    @property
    def rung_prefix(self) -> str:
        """The rung as the prefix of a message about an attempt; empty without a ladder."""
        return f"{self.rung.words}: " if self.rung else ""

    @cached_property
    def holding(self) -> Holding:
        """The chips of the job's workers and placeholders, each on its own slice."""
        per_host = {option.number: option.layout.shape.chips_per_host for option in self.options}
        return read_holding(self.observed, self.status, self.now, per_host)

    @cached_property
    def queue(self) -> Queue | None:
        """The queue with the Workload of the present slice; None without a queue."""
        return self.queue_on(self.option)

    def queue_on(self, option: SliceOption) -> Queue | None:
        """Returns the queue with the Workload of that slice; None without a queue."""
        name = workload_name(self.job.name, self.job.uid, option.number)
        return None if self.observed.queue is None else self.observed.queue.at(name)

    @property
    def all_workers(self) -> list[WorkerPod]:
        """The workers of the current attempt and of earlier ones, on any slice."""
        return [*self.observed.before_attempt(self.attempt), *self.observed.of_attempt(self.attempt)]

    @property
    def is_running(self) -> bool:
        return is_true(self.status.conditions, ConditionType.GANG_READY)

    @property
    def has_trained(self) -> bool:
        """Returns whether the job has reached its first step, on any slice."""
        goodput = self.status.goodput
        return goodput is not None and goodput.productive + goodput.wasted > 0

    @property
    def is_refused(self) -> bool:
        """Returns whether the cluster refused what the last pass wanted to create."""
        ready = find(self.status.conditions, ConditionType.READY)
        waits = ready is not None and ready.reason == Reason.WAITING_FOR_DELETED_JOB
        return waits or is_true(self.status.conditions, ConditionType.STALLED)

    @property
    def reports(self) -> bool:
        """Returns whether the gang will report its progress: it runs the operator's trainer, and the operator
        listens."""
        return self.reporting is not None and self.job.spec.trainer.entrypoint is not None

    @property
    def has_reported(self) -> bool:
        """Returns whether a worker of the current attempt has reported."""
        return self.status.progress is not None and self.status.progress.phase is not None

    def goodput_of_stopped(self) -> Goodput | None:
        """Returns the goodput of an attempt that a suspension or Kueue has stopped. A gang that reports its checkpoints
        has saved only what came before the last of them; any other is taken to have saved when it stopped."""
        goodput, progress = self.status.goodput, self.status.progress
        if goodput is None:
            return None
        reports_checkpoints = self.reports or (progress is not None and progress.checkpoint_step is not None)
        if self.job.spec.checkpoint is None or (self.has_reported and reports_checkpoints):
            return mark_lost(goodput)
        return mark_saved(goodput)

    def settled_goodput(self, until: datetime | None = None) -> Goodput:
        """Returns the goodput up to `until`, by default up to now."""
        created = self.job.metadata.get("creationTimestamp", format_time(self.now))
        pods = [] if self.missing else self.pods
        return settle(self.status.goodput or start_goodput(created), pods, until or self.now, self.holding)

    def goodput_at_end(self, until: datetime) -> Goodput:
        """Returns the goodput of an attempt that ends. A gang that ran and never reported counts as having trained."""
        goodput = self.status.goodput
        if goodput is None or not self.is_running or self.has_reported:
            return self.settled_goodput(until)
        return self.charge(replace(goodput, activity=Activity.TRAIN), until, Activity.TRAIN)


def isolate(ctx: Context, *, again: bool = False) -> Sequence[Create]:
    """Returns the creation of the NetworkPolicy that keeps other pods from the workers, if the installation wants one.
    `again`: an earlier attempt has created it."""
    if ctx.network_policy is None:
        return ()
    return (Create(ctx.network_policy.network_policy(ctx.job), optional=True, again=again),)
