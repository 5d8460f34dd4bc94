"""How a job ends: it succeeds because all workers have, or it fails.

The user's own loop may write anything as its termination message, and nothing in it may keep a job from succeeding.
"""

from collections.abc import Sequence

from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Goodput, Progress, State, Status
from tpu_training_operator.api.words import number_text
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.objects.actions import AT_ONCE, Event
from tpu_training_operator.domain.plan.common.conditions import JobState, ReadyState
from tpu_training_operator.domain.plan.common.rung_status import with_end
from tpu_training_operator.domain.plan.plan import Plan, Turn

_LONGEST_WORDS = 500


def succeed(look: JobState, gang: Sequence[WorkerPod], goodput: Goodput | None, train_steps: int) -> Plan:
    """Ends the job as succeeded. `gang`: all workers of the attempt, worker 0 first. `goodput`: complete up to now.
    `train_steps`: those of the recipe."""
    finished = "the worker has finished" if len(gang) == 1 else f"all {len(gang)} workers have finished"
    message = f"{finished}{_read_summary(gang[0])}"
    ready = ReadyState(State.SUCCEEDED, Reason.ALL_WORKERS_SUCCEEDED, message)
    progress = read_final_progress(gang[0], train_steps, look.status.progress) or look.status.progress
    status = replace(look.status, progress=progress, goodput=goodput)
    status = with_end(status, progress.examples_per_second if progress else None, succeeded=True)
    if look.is_suspended:
        status = look.with_condition(status, ConditionType.SUSPENDED, False, ready.reason, message)
    status = look.with_condition(status, ConditionType.SUCCEEDED, True, ready.reason, message)
    event = Event(EventReason.SUCCEEDED, message)
    return Plan(status=look.finish(status, ready), events=(event,), again=AT_ONCE, turn=Turn.END)


def fail(ctx: JobState, status: Status, reason: Reason, message: str) -> Plan:
    ready = ReadyState(State.FAILED, reason, message)
    status = with_end(status, None, succeeded=False)
    if status.progress is not None:
        status = replace(status, progress=replace(status.progress, estimated_remaining_seconds=None))
    status = ctx.with_condition(status, ConditionType.FAILED, True, reason, message)
    event = Event(EventReason.FAILED, message, warning=True)
    return Plan(status=ctx.finish(status, ready), events=(event,), again=AT_ONCE, turn=Turn.END)


def describe_deadline(limit: int | None) -> str:
    return f"the job has been active for {limit} s, the limit in spec.runPolicy.activeDeadlineSeconds"


def read_final_progress(leader: WorkerPod, total_steps: int, reported: Progress | None) -> Progress | None:
    """Reads step, speed and metrics from worker 0's termination message and adds them to what it `reported` before;
    None if the message has no step, as with the user's own loop."""
    message = leader.trainer_message
    if message is None or message.step is None:
        return None
    metrics = message.metric_texts
    before = reported or Progress(step=0, total_steps=total_steps)
    # An attempt that finds all steps done trains nothing, and so reports no loss.
    known = before.loss if message.step == before.step else None
    return replace(
        before,
        step=message.step,
        examples_per_second=number_text(message.examples_per_second),
        loss=metrics.get("loss", known),
        metrics=metrics,
        checkpoint_step=before.checkpoint_step if message.checkpoint_step is None else message.checkpoint_step,
        best_checkpoint=message.best or before.best_checkpoint,
        phase=before.phase and ReportPhase.DONE,
        estimated_remaining_seconds=None,
    )


def _read_summary(leader: WorkerPod) -> str:
    """Reads the trainer's own summary in one line, such as ": trained 300 steps, loss 0.1"; empty if it left none."""
    message = leader.trainer_message
    words = message.message if message is not None and message.outcome == "Succeeded" else ""
    line = next(iter(words.strip().splitlines()), "")
    return f": {line[:_LONGEST_WORDS]}" if line else ""
