"""Whether the job's step fits into a core's memory: the condition StepFits, from what the entry check has compiled.

A step that does not fit fails the job while it holds no chips. Without an answer from the compiler the job starts all
the same, unless the user has required one.
"""

from collections.abc import Iterator

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason
from tpu_training_operator.api.entry_check import CompileCheck
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.observed import EntryCheckPod
from tpu_training_operator.domain.job.options import Option
from tpu_training_operator.domain.job.recipe.compile_results import NOT_THERE, UNFINISHED, Compiled, compiled
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.domain.objects.entry_check_pod import compile_seconds, compiled_elsewhere
from tpu_training_operator.domain.plan.common.context import Context

_STEP = ConditionType.STEP_FITS


def record_fit(ctx: Context, status: Status) -> tuple[Status, list[Event]]:
    """Returns the status with the condition, and its event; both only if the pod was to compile the step."""
    each = list(_read_results(ctx))
    if not each:
        return status, []
    _, own = each[0]
    message = "; ".join(found.message for _, found in each)
    # The job begins on its own slice. That it cannot move to another one is worth a warning.
    warns = any(found.fits is not True for _, found in each)
    reason = {True: Reason.STEP_FITS, False: Reason.STEP_TOO_LARGE, None: Reason.STEP_NOT_COMPILED}[own.fits]
    status = ctx.with_condition(status, _STEP, own.fits, reason, message)
    return status, [] if own.trouble == NOT_THERE else [Event(EventReason(reason), message, warning=warns)]


def find_refusal(ctx: Context) -> tuple[Reason, str, str] | None:
    """Says why the job may not begin: the reason, what was found, and what follows. None if it may begin."""
    each = list(_read_results(ctx))
    for option, found in each:
        if found.fits is False and option in (ctx.option, ctx.options[0]):
            return Reason.STEP_TOO_LARGE, f"the step on {found.message}", "no worker was created"
    if ctx.job.spec.entry_check.compile is not CompileCheck.REQUIRE:
        return None
    if not each:
        return Reason.STEP_NOT_COMPILED, "the entry check ended before it compiled the step", _REQUIRED
    _, own = each[0]
    return None if own.fits else (Reason.STEP_NOT_COMPILED, f"the step on {own.message}", _REQUIRED)


_REQUIRED = "spec.entryCheck.compile is Require"


def _read_results(ctx: Context) -> Iterator[tuple[Option, Compiled]]:
    """Yields what was compiled, the job's own slice first."""
    pod = ctx.observed.entry_check_pod
    said = None if pod is None else pod.trainer_message
    if pod is None or said is None or said.get("outcome") != "Succeeded" or compile_seconds(ctx.job) is None:
        return
    if "compiled" not in said:
        why = "the trainer in the image is older than the compile check"
        yield ctx.option, Compiled(None, f"{ctx.option.layout}: {why}", NOT_THERE)
        return
    listed = said["compiled"] if isinstance(said["compiled"], list) else []
    for option, words in zip(
        [ctx.option, *compiled_elsewhere(ctx.option, ctx.options)], listed or [None], strict=False
    ):
        found = compiled(words, option.layout)
        yield option, _explain_end(found, pod, ctx) if found.trouble == UNFINISHED else found


def _explain_end(found: Compiled, pod: EntryCheckPod, ctx: Context) -> Compiled:
    """Adds to the result what ended the pod."""
    if pod.termination.get("reason") == "OOMKilled":
        why = "out of memory; spec.entryCheck.resources gives it more"
    elif pod.exit_code == 0 or pod.raw.get("status", {}).get("reason") == "DeadlineExceeded":
        why = f"not done within {ctx.job.spec.entry_check.deadline_seconds} s (spec.entryCheck.deadlineSeconds)"
    else:
        why = f"exit code {pod.exit_code}"
    return Compiled(None, f"{found.message}: {why}", UNFINISHED)
