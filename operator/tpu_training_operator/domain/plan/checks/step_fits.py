"""Whether the job's step fits into a core's memory: the condition StepFits, from what the entry check has compiled.

A step that does not fit fails the job while it holds no chips. Without an answer from the compiler the job starts
anyway, unless the user has required one.
"""

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.entry_check import CompileCheck
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.status import CheckedProgram, Status
from tpu_training_operator.domain.cluster_state.observed import EntryCheckPod
from tpu_training_operator.domain.job.recipe.compile_results import NOT_THERE, UNFINISHED, CompileResult
from tpu_training_operator.domain.job.trainer_report import CompiledStep
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.domain.objects.entry_check_pod import compile_seconds
from tpu_training_operator.domain.plan.common.context import Context

_REASONS = {True: Reason.STEP_FITS, False: Reason.STEP_TOO_LARGE, None: Reason.STEP_NOT_COMPILED}
_NO_ANSWER = "its trainer is older than the compile check, or its answer cannot be read"
_REQUIRED = "spec.entryCheck.compile is Require"


def record_fit(ctx: Context, status: Status) -> tuple[Status, list[Event]]:
    """Returns the status with the condition StepFits, and its event; both only if the pod was asked to compile the
    step."""
    result = _read_result(ctx)
    if result is None:
        return status, []
    reason = _REASONS[result.fits]
    status = ctx.with_condition(status, ConditionType.STEP_FITS, result.fits, reason, result.message)
    if result.step.digest:
        program = CheckedProgram(digest=result.step.digest, slice=str(result.layout))
        status = replace(status, checked_program=program)
    event = Event(EventReason(reason), result.message, warning=result.fits is not True)
    return status, [] if result.step.trouble == NOT_THERE else [event]


def program_to_expect(ctx: Context) -> str | None:
    """Returns the digest of the program that was compiled for the slice of the attempt; None if none was. That of a
    ladder is its first rung's, which measures the noise scale, as the job on its own slice does not. A rehearsal on
    CPUs runs another program than the TPU's, which was compiled."""
    checked, resolution = ctx.status.checked_program, ctx.resolution
    if checked is None or checked.slice != str(resolution.layout) or ctx.job.spec.slice.hardware is Hardware.CPU:
        return None
    return checked.digest if (resolution.lower_rung is None) == (ctx.job.spec.ladder is None) else None


def find_refusal(ctx: Context) -> tuple[Reason, str, str] | None:
    """Says why the job may not begin: the reason, and two clauses for its message, the result and what follows from it.
    None if it may begin."""
    result = _read_result(ctx)
    if result is not None and result.fits is False:
        return Reason.STEP_TOO_LARGE, f"the step on {result.message}", "no worker was created"
    if ctx.job.spec.entry_check.compile is not CompileCheck.REQUIRE:
        return None
    if result is None:
        return Reason.STEP_NOT_COMPILED, "the entry check ended before it compiled the step", _REQUIRED
    return None if result.fits else (Reason.STEP_NOT_COMPILED, f"the step on {result.message}", _REQUIRED)


def _read_result(ctx: Context) -> CompileResult | None:
    """Returns the compiler's result; None if the pod did not come so far, or was not to compile."""
    pod = ctx.observed.entry_check_pod
    message = None if pod is None else pod.trainer_message
    if pod is None or message is None or message.outcome != "Succeeded" or compile_seconds(ctx.job) is None:
        return None
    step = message.compiled
    if step is None:
        step = CompiledStep(trouble=NOT_THERE, said=_NO_ANSWER)
    elif step.trouble == UNFINISHED:
        step = CompiledStep(trouble=UNFINISHED, said=_explain_end(pod, ctx))
    return CompileResult(ctx.option.layout, step)


def _explain_end(pod: EntryCheckPod, ctx: Context) -> str:
    if pod.termination.get("reason") == "OOMKilled":
        return "out of memory; spec.entryCheck.resources gives it more"
    if pod.exit_code == 0 or pod.raw.get("status", {}).get("reason") == "DeadlineExceeded":
        return f"not done within {ctx.job.spec.entry_check.deadline_seconds} s (spec.entryCheck.deadlineSeconds)"
    return f"exit code {pod.exit_code}"
