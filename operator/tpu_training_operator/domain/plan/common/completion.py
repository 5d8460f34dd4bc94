"""How a job ends: all workers succeeded, or its time is up. And what happens to a job that has finished.

The user's own loop may write anything as its termination message, and nothing in it may keep a job from succeeding.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.status import (
    LONGEST_TEXT,
    MOST_METRICS,
    BestCheckpoint,
    Goodput,
    Progress,
    ReportPhase,
    State,
    Status,
)
from tpu_training_operator.api.text import plain
from tpu_training_operator.api.words import number_text
from tpu_training_operator.domain.cluster_state.observed import Object, WorkerPod, parse_time
from tpu_training_operator.domain.cluster_state.workload import is_copy, is_in_queue, manager_of, owes_an_end
from tpu_training_operator.domain.failures.messages import step_reached
from tpu_training_operator.domain.objects.actions import AT_ONCE, DeleteJob, Event
from tpu_training_operator.domain.plan.common.conditions import Kind, ReadyState, Snapshot
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.goodput import active_seconds
from tpu_training_operator.domain.plan.common.pod_cleanup import deletions, next_force
from tpu_training_operator.domain.plan.common.rung_status import with_end
from tpu_training_operator.domain.plan.freshness import Freshness
from tpu_training_operator.domain.plan.plan import Batch, Plan, Turn

# A century; a longer time could not be added to a date.
_LONGEST_TTL_SECONDS = 100 * 365 * 24 * 3600
_LONGEST_WORDS = 500


def succeed(look: Snapshot, gang: Sequence[WorkerPod], goodput: Goodput | None, train_steps: int) -> Plan:
    """`gang`: all workers of the attempt; the first one leads. `goodput`: up to now. `train_steps`: of the recipe."""
    finished = "the worker has finished" if len(gang) == 1 else f"all {len(gang)} workers have finished"
    message = f"{finished}{_final_words(gang[0])}"
    ready = ReadyState(State.SUCCEEDED, Kind.SETTLED, Reason.ALL_WORKERS_SUCCEEDED, message)
    progress = final_progress(gang[0], train_steps, look.status.progress) or look.status.progress
    status = replace(look.status, progress=progress, goodput=goodput)
    status = with_end(status, progress.examples_per_second if progress else None, succeeded=True)
    if look.is_suspended:
        status = look.with_condition(status, ConditionType.SUSPENDED, False, ready.reason, message)
    status = look.with_condition(status, ConditionType.SUCCEEDED, True, ready.reason, message)
    event = Event(EventReason.SUCCEEDED, message)
    return Plan(status=look.finish(status, ready), events=(event,), again=AT_ONCE, turn=Turn.END)


def fail(ctx: Snapshot, status: Status, reason: Reason, message: str) -> Plan:
    ready = ReadyState(State.FAILED, Kind.STUCK, reason, message)
    status = with_end(status, None, succeeded=False)
    if status.progress is not None:
        status = replace(status, progress=replace(status.progress, estimated_remaining_seconds=None))
    status = ctx.with_condition(status, ConditionType.FAILED, True, reason, message)
    event = Event(EventReason.FAILED, message, warning=True)
    return Plan(status=ctx.finish(status, ready), events=(event,), again=AT_ONCE, turn=Turn.END)


def active_time_left(ctx: Context) -> timedelta | None:
    """Time until `activeDeadlineSeconds` if the job stays active; None without that deadline."""
    limit = ctx.job.spec.run_policy.active_deadline_seconds
    return None if limit is None else timedelta(seconds=limit - active_seconds(ctx.settled_goodput()))


def deadline_words(limit: int | None) -> str:
    return f"the job has been active for {limit} s, the limit in spec.runPolicy.activeDeadlineSeconds"


def exceed_deadline(ctx: Context) -> Plan:
    message = deadline_words(ctx.job.spec.run_policy.active_deadline_seconds)
    status = replace(ctx.status, goodput=ctx.goodput_at_end(ctx.now))
    return fail(ctx, status, Reason.DEADLINE_EXCEEDED, message)


def delete_when_due(look: Snapshot) -> Plan | None:
    """Plans the deletion of a finished job whose time to live is over."""
    left, metadata = _time_left(look), look.observed.job["metadata"]
    if left is None or left > AT_ONCE:
        return None
    deletion = Batch((DeleteJob(metadata["name"], metadata["uid"]),), Freshness.FRESH_ALL)
    # With the status as it is: the operator cannot write one into a job that is gone.
    return Plan(batches=(deletion,), status=look.status)


def after_the_end(look: Snapshot) -> Plan:
    """Stops what still runs of a finished job."""
    running = [pod for pod in look.observed.every_pod if not pod.has_ended]
    batches = deletions(running, look.now, Freshness.FRESH_ALL)
    return Plan(batches).due_within(_time_left(look), next_force(running, look.now))


def _time_left(look: Snapshot) -> timedelta | None:
    """Returns how long the finished job stays; None if nothing limits that."""
    ttl, end = _time_to_live(look.observed.job), look.status.completion_time
    return None if ttl is None or end is None else parse_time(end) + ttl - look.now


def may_need_a_pass(job: Object, now: datetime) -> bool:
    """Whether the resync should enqueue the job. The last pass over a finished job has asked to be called when its time
    to live is over; only if that time has passed, the request may be lost."""
    status = Status.read(job.get("status"))
    if status.completion_time is None or owes_an_end(job):
        return not is_at_rest(job)
    ttl = _time_to_live(job)
    return ttl is not None and parse_time(status.completion_time) + ttl <= now


def is_at_rest(job: Object) -> bool:
    """Whether the job is suspended, and its status says so of this spec and waits for nothing. Only a change, or a pod
    that should not be there, gives a pass something to do. A job in a queue may still have to give back its quota."""
    metadata, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    if status.get("state") != State.SUSPENDED or (spec.get("runPolicy") or {}).get("suspend") is not True:
        return False
    if is_in_queue(job) or manager_of(job) or "deletionTimestamp" in metadata:
        return False
    is_true = {each.get("type") for each in status.get("conditions") or () if each.get("status") == "True"}
    is_settled = ConditionType.READY in is_true and ConditionType.RECONCILING not in is_true
    return is_settled and status.get("observedGeneration") == metadata.get("generation")


def _time_to_live(job: Object) -> timedelta | None:
    """From the raw spec: this operator might refuse the spec of a finished job. A copy is deleted by Kueue, once it has
    told the other cluster how it ended; until then, one that is gone would run once more."""
    if is_copy(job):
        return None
    policy = job.get("spec", {}).get("runPolicy") or {}
    given = policy.get("ttlSecondsAfterFinished")
    return timedelta(seconds=max(0, min(given, _LONGEST_TTL_SECONDS))) if isinstance(given, int) else None


def final_progress(leader: WorkerPod, total_steps: int, reported: Progress | None) -> Progress | None:
    """Step, speed and metrics from worker 0's termination message, on top of what it `reported` before; None if the
    message has no step, as with the user's own loop."""
    message, step = leader.trainer_message, step_reached(leader)
    if message is None or step is None:
        return None
    metrics = _metrics(message.get("metrics"))
    before = reported or Progress(step=0, total_steps=total_steps)
    # An attempt that finds all steps done has no loss of its own.
    known = before.loss if step == before.step else None
    return replace(
        before,
        step=step,
        examples_per_second=number_text(message.get("examplesPerSecond")),
        loss=metrics.get("loss", known),
        metrics=metrics,
        best_checkpoint=_best(message.get("bestCheckpoint")) or before.best_checkpoint,
        phase=before.phase and ReportPhase.DONE,
        estimated_remaining_seconds=None,
    )


def _final_words(leader: WorkerPod) -> str:
    """The trainer's own summary in one line, such as ": trained 300 steps, loss 0.1"; empty if it left none."""
    message = leader.trainer_message or {}
    words = message.get("message") if message.get("outcome") == "Succeeded" else None
    line = next(iter(plain(words).strip().splitlines()), "") if isinstance(words, str) else ""
    return f": {line[:_LONGEST_WORDS]}" if line else ""


def _metrics(given: Any) -> dict[str, str]:
    """Those values that are numbers, as many as the status has room for."""
    if not isinstance(given, dict):
        return {}
    texts = ((plain(name), number_text(value)) for name, value in given.items())
    return dict(islice(((name, text) for name, text in texts if text is not None), MOST_METRICS))


def _best(given: Any) -> BestCheckpoint | None:
    """None unless every field is there as the trainer writes it."""
    if not isinstance(given, dict):
        return None
    name, step, metric, value = given.get("name"), given.get("step"), given.get("metric"), given.get("value")
    number = number_text(value)
    if not (isinstance(name, str) and isinstance(metric, str) and number is not None):
        return None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= 2**53:
        return None
    return BestCheckpoint(name=plain(name)[:LONGEST_TEXT], step=step, metric=plain(metric)[:LONGEST_TEXT], value=number)
