"""What to do about a job whose spec this operator cannot use.

Such a job does not start. If it has started, it became invalid later, mostly under another version of the operator, and
its gang keeps training with the numbers that the status still has. The limits of every job apply to it: suspension,
budget, deadlines and Kueue's eviction are read from the raw spec, the status and the Workload. A gang that has lost a
worker is stopped, because the worker cannot be replaced. So is a gang whose numbers the status has lost: without its
size it is unknown what it uses, and whether it has succeeded.

A stopped gang is suspended, or waits in its queue, as with a valid spec. So the job continues once the spec is valid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.run_policy import ChipBudget, OnExceeded, RunPolicy
from tpu_training_operator.api.status import Activity, Goodput, State, Status
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.failures.first import first_failure, next_look
from tpu_training_operator.domain.failures.pod_signs import has_succeeded
from tpu_training_operator.domain.objects.actions import AT_ONCE, Event
from tpu_training_operator.domain.plan.common.accounts import active_seconds, settle, start_goodput
from tpu_training_operator.domain.plan.common.completion import describe_deadline, fail, succeed
from tpu_training_operator.domain.plan.common.conditions import JobState, ReadyState
from tpu_training_operator.domain.plan.common.pod_cleanup import delete_pods, look_again
from tpu_training_operator.domain.plan.common.rung_status import is_on_lower_rung
from tpu_training_operator.domain.plan.plan import LOOK_AGAIN, Plan, Turn
from tpu_training_operator.domain.plan.queue.queueing import explain_eviction, give_up_quota
from tpu_training_operator.domain.plan.restarts.waiting import find_late, find_partly_placed
from tpu_training_operator.domain.plan.start import later_workers, may_be_newer_than_read
from tpu_training_operator.domain.plan.stopping import budget
from tpu_training_operator.domain.plan.stopping.suspension import BY_USER, Cause

_READ_AGAIN = timedelta(seconds=1)


def plan_invalid(look: JobState, error: InvalidJob) -> Plan:
    """Plans for a job whose spec cannot be used. Its placeholders go, because without the spec no better slice is
    known."""
    job = _InvalidState(look.observed, look.status, look.now, error)
    return job.plan().then(Plan(delete_pods(look.observed.placeholders, look.now)))


def read_budget(look: JobState) -> ChipBudget | None:
    """Returns the budget in the raw spec; if it cannot be read, one with the hours that the status remembers."""
    policy, budget = _find_policy(look), _read_policy(look).budget
    if budget is not None or (policy is not None and policy.get("budget") is None):
        return budget
    known = look.status.usage.budget_chip_hours if look.status.usage else None
    return ChipBudget(chip_hours=known) if known else None


def _read_policy(look: JobState) -> RunPolicy:
    """Returns those fields of spec.runPolicy that can be read, and the defaults of the others."""
    policy = _find_policy(look) or {}
    return RunPolicy.model_validate({name: value for name, value in policy.items() if _is_readable(name, value)})


def _is_readable(name: str, value: Any) -> bool:
    try:
        RunPolicy.model_validate({name: value})
    except ValidationError:
        return False
    return True


def _find_policy(look: JobState) -> Mapping[str, Any] | None:
    spec = look.observed.job.get("spec")
    policy = spec.get("runPolicy", {}) if isinstance(spec, Mapping) else None
    return policy if isinstance(policy, Mapping) else None


@dataclass(frozen=True)
class _InvalidState(JobState):
    error: InvalidJob

    def plan(self) -> Plan:
        status = self.status
        if (unknown := later_workers(self.observed, status.attempt)) and not self._workers:
            return self._adopt(unknown)
        if status.attempt == 0:
            return Plan(give_up_quota(self.observed), self._present(status))
        if status.resolved and self._gang and all(map(has_succeeded, self._gang)) and not is_on_lower_rung(status):
            return succeed(self, self._gang, status.goodput, status.resolved.train_steps)
        if self.is_suspended or self.is_held:
            return self._rest()
        limit = self._policy.active_deadline_seconds
        left = None if limit is None else timedelta(seconds=limit - active_seconds(self._goodput))
        if left is not None and left <= AT_ONCE:
            message = describe_deadline(limit)
            return fail(self, replace(status, goodput=self._goodput), Reason.DEADLINE_EXCEEDED, message)
        if (cause := self._find_cause()) is not None:
            return self._stop(cause)
        message = f"this operator cannot use the spec and only watches attempt {status.attempt}: {self.error}"
        is_news = status.state is not State.INVALID
        events = (Event(EventReason.INVALID_SPEC, message, warning=True),) if is_news else ()
        watched = Plan(status=self._present(status), events=events)
        again = LOOK_AGAIN if self.observed.queue else None
        start = self._start_limit[0] - self.now if self._start_limit else None
        until_spent = budget.until_spent(self._spent, self.holding) if self._spent else None
        return watched.due_within(left, again, start, next_look(self._gang, self.now), until_spent)

    def _adopt(self, unknown: Sequence[WorkerPod]) -> Plan:
        """Records the attempt of these workers: the status was lost, or shows an earlier one."""
        if may_be_newer_than_read(unknown, self.now):
            return Plan(again=_READ_AGAIN)
        attempt = max(pod.worker.attempt for pod in unknown)
        event = Event(
            EventReason.STATUS_LOST, f"the status was lost; the workers belong to attempt {attempt}", warning=True
        )
        status = replace(self._present(self.status), attempt=attempt)
        return Plan(status=status, events=(event,), again=AT_ONCE, turn=Turn.ATTEMPT)

    # Limits that apply without a valid spec.

    def _find_cause(self) -> Cause | None:
        spent = self._spent
        if self._policy.suspend:
            return BY_USER
        if spent is not None and spent.is_all:
            return Cause(Reason.BUDGET_EXCEEDED, EventReason.BUDGET_EXCEEDED, spent.words())
        if (why := explain_eviction(self)) is not None:
            return Cause(Reason.EVICTED, EventReason.EVICTED, why)
        if (why := self._explain_loss()) is not None:
            return Cause(Reason.INVALID_SPEC, EventReason.SUSPENDED, why)
        return None

    @cached_property
    def _policy(self) -> RunPolicy:
        return _read_policy(self)

    @cached_property
    def _spent(self) -> budget.Spent | None:
        limit = read_budget(self)
        used = budget.count_used(self, self.status)
        return None if limit is None else budget.Spent(used, limit.chip_hours * 3600)

    @cached_property
    def _goodput(self) -> Goodput:
        created = str(self.observed.job["metadata"]["creationTimestamp"])
        return settle(self.status.goodput or start_goodput(created), self._gang, self.now, self.holding)

    @cached_property
    def _gang(self) -> list[WorkerPod]:
        """All workers of the attempt; empty if any is missing."""
        workers = self._workers
        return workers if self.status.resolved and len(workers) == self.status.resolved.hosts else []

    @cached_property
    def _workers(self) -> list[WorkerPod]:
        if (layout := self.status.resolved) is None:
            return []
        slices, hosts = layout.slices, layout.hosts_per_slice
        pods = self.observed.of_attempt(self.attempt)
        return [pod for pod in pods if pod.worker.slice < slices and pod.worker.host < hosts]

    def _explain_loss(self) -> str | None:
        """Says why the gang cannot train to its end; None if it can."""
        if (layout := self.status.resolved) is None:
            return "status.resolved was removed, so the size of the gang is unknown, and its chips cannot be counted"
        failure = first_failure(self._workers, self.status.attempt, self.now, settle_user_errors=True)
        if failure is not None:
            return f"worker {failure.pod} has failed ({failure.reason}), and the spec must be valid to replace it"
        if missing := layout.hosts - len(self._workers):
            return f"{count(missing, 'worker')} missing, and the spec must be valid to create them"
        return self._start_limit[1] if self._start_limit and self._start_limit[0] <= self.now else None

    @cached_property
    def _start_limit(self) -> tuple[datetime, str] | None:
        """The time until which a gang that has not started may hold its nodes, and why it then gives them back."""
        policy = self._policy
        if part := find_partly_placed(self._gang, policy, self.status.avoided_nodes):
            waiting, limit = count(part.waiting, "worker"), policy.start_deadline_seconds
            return part.deadline, f"{waiting} could not be placed within {limit} s, so the others release their nodes"
        if late := find_late(self._gang, policy):
            limit = int(late.limit.total_seconds())
            return late.deadline, f"worker {late.pod.name} has not started within {limit} s on its node"
        return None

    # Stopping.

    def _stop(self, cause: Cause) -> Plan:
        """Records that the workers stop, before any of them is stopped, as with a valid spec."""
        is_eviction = cause.reason is Reason.EVICTED
        rest, value = (ConditionType.ADMITTED, False) if is_eviction else (ConditionType.SUSPENDED, True)
        status = self._present(self.status, cause.message)
        for kind, is_so in ((rest, value), (ConditionType.GANG_READY, False)):
            status = self.with_condition(status, kind, is_so, cause.reason, cause.message)
        activity = Activity.QUEUE if is_eviction else Activity.SUSPENDED
        goodput = self.charge(self._goodput, self.now, activity)
        event = Event(cause.event, f"stopping the workers: {cause.message}", warning=cause is not BY_USER)
        return Plan(status=replace(status, goodput=goodput), events=(event,), again=AT_ONCE, turn=Turn.SUSPEND)

    def _rest(self) -> Plan:
        """Stops the workers and gives the quota back, until the spec is valid."""
        # Failed workers are kept for their logs.
        known = self.observed.before_attempt(self.status.attempt + 1)
        pods, limit = [pod for pod in known if pod.phase != "Failed"], read_budget(self)
        if self._spent and self._spent.is_all and limit and limit.on_exceeded is OnExceeded.FAIL and not pods:
            return fail(self, self.status, Reason.BUDGET_EXCEEDED, self._spent.words())
        batches = (*delete_pods(pods, self.now), *give_up_quota(self.observed))
        shown = self._present(self.status, "its workers are stopped")
        queue = self.observed.queue
        again = LOOK_AGAIN if queue and (queue.workload or queue.others) else None
        return Plan(batches, shown).due_within(look_again(pods, self.now), again)

    def _present(self, status: Status, also: str = "") -> Status:
        message = f"{self.error}; {also}" if also else str(self.error)
        return self.present(status, ReadyState(State.INVALID, Reason.INVALID_SPEC, message))
