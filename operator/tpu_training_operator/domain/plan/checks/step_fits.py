"""Whether the job's step fits into a core's memory: the condition StepFits, from what the entry check has compiled.

A step that does not fit fails the job while it holds no chips. Without an answer from the compiler the job starts
anyway, unless the user has required one.
"""

from collections.abc import Iterator

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.entry_check import CompileCheck
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.observed import EntryCheckPod
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.job.recipe.compile_results import (
    NOT_THERE,
    UNFINISHED,
    CompileResult,
    read_compile_result,
)
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.domain.objects.entry_check_pod import compile_seconds, compiled_elsewhere
from tpu_training_operator.domain.plan.common.context import Context

_STEP = ConditionType.STEP_FITS


def record_fit(ctx: Context, status: Status) -> tuple[Status, list[Event]]:
    """Returns the status with the condition StepFits, and its event; both only if the pod was asked to compile the
    step."""
    results = list(_read_results(ctx))
    if not results:
        return status, []
    _, first = results[0]
    message = "; ".join(result.message for _, result in results)
    # The step may fit on the job's own slice and not on an alternative, which is worth a warning.
    warns = any(result.fits is not True for _, result in results)
    reason = {True: Reason.STEP_FITS, False: Reason.STEP_TOO_LARGE, None: Reason.STEP_NOT_COMPILED}[first.fits]
    status = ctx.with_condition(status, _STEP, first.fits, reason, message)
    return status, [] if first.trouble == NOT_THERE else [Event(EventReason(reason), message, warning=warns)]


def find_refusal(ctx: Context) -> tuple[Reason, str, str] | None:
    """Says why the job may not begin: the reason, and two clauses for its message, the result and what follows from it.
    None if it may begin."""
    results = list(_read_results(ctx))
    for option, result in results:
        if result.fits is False and option in (ctx.option, ctx.options[0]):
            return Reason.STEP_TOO_LARGE, f"the step on {result.message}", "no worker was created"
    if ctx.job.spec.entry_check.compile is not CompileCheck.REQUIRE:
        return None
    if not results:
        return Reason.STEP_NOT_COMPILED, "the entry check ended before it compiled the step", _REQUIRED
    _, first = results[0]
    return None if first.fits else (Reason.STEP_NOT_COMPILED, f"the step on {first.message}", _REQUIRED)


_REQUIRED = "spec.entryCheck.compile is Require"


def _read_results(ctx: Context) -> Iterator[tuple[SliceOption, CompileResult]]:
    """Yields the compiler's result for each slice, the job's own slice first."""
    pod = ctx.observed.entry_check_pod
    message = None if pod is None else pod.trainer_message
    if pod is None or message is None or message.outcome != "Succeeded" or compile_seconds(ctx.job) is None:
        return
    if message.compiled is None:
        why = "the trainer in the image is older than the compile check"
        yield ctx.option, CompileResult(None, f"{ctx.option.layout}: {why}", NOT_THERE)
        return
    asked = [ctx.option, *compiled_elsewhere(ctx.option, ctx.options)]
    for option, compiled in zip(asked, message.compiled or [None], strict=False):
        result = read_compile_result(compiled, option.layout)
        yield option, _explain_end(result, pod, ctx) if result.trouble == UNFINISHED else result


def _explain_end(result: CompileResult, pod: EntryCheckPod, ctx: Context) -> CompileResult:
    """Returns the result of a pod that ended too early, with the reason why it ended."""
    if pod.termination.get("reason") == "OOMKilled":
        why = "out of memory; spec.entryCheck.resources gives it more"
    elif pod.exit_code == 0 or pod.raw.get("status", {}).get("reason") == "DeadlineExceeded":
        why = f"not done within {ctx.job.spec.entry_check.deadline_seconds} s (spec.entryCheck.deadlineSeconds)"
    else:
        why = f"exit code {pod.exit_code}"
    return CompileResult(None, f"{result.message}: {why}", UNFINISHED)
