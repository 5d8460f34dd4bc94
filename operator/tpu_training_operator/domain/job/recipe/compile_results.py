"""What the TPU's compiler says about a job's step, read from the message of the entry check's pod and put into words.

The operator does not control the pod's image, so the message can have any form.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.bound import Bound, StepCollective, StepCost, bound_of
from tpu_training_operator.domain.job.topology import SliceLayout
from tpu_training_operator.domain.job.trainer_report import CompiledStep

_MOST_FINDINGS = 2

NOT_THERE = "Missing"
UNFINISHED = "Unfinished"
_TROUBLES = {
    NOT_THERE: "the image cannot compile it",
    UNFINISHED: "the pod ended while it was compiled",
    "TooSlow": "it was not compiled in time",
    "Ended": "compiling ended without an answer",
    "UnknownSlice": "the image's libtpu does not know the slice",
}
_CANNOT_TRACE = "it cannot be traced"


@dataclass(frozen=True)
class CompileResult:
    """`fits`: None if it is not known, and `message` says why. `trouble`: what kept the compiler from an answer."""

    fits: bool | None
    message: str
    trouble: str = ""


def read_compile_result(step: CompiledStep | None, layout: SliceLayout) -> CompileResult:
    """Puts into words what the message says about the step on this slice; None if that cannot be read."""
    step = step or CompiledStep(trouble="Ended", said="the pod's message cannot be read")
    if step.trouble or step.fits is None:
        return CompileResult(None, f"{layout}: {_describe_unknown(step)}", step.trouble)
    if not step.fits:
        return CompileResult(False, f"{layout}: {_describe_excess(step)}")
    return CompileResult(True, f"{layout}: {'; '.join(_describe_fit(step, layout))}")


def _describe_unknown(step: CompiledStep) -> str:
    if step.trouble:
        return _TROUBLES.get(step.trouble, _CANNOT_TRACE) + (f": {step.said}" if step.said else "")
    if step.refusal:
        return f"the compiler refuses the step: {step.refusal}"
    return f"it cannot be one program: {', '.join(step.found[:_MOST_FINDINGS]) or 'no reason given'}"


def _describe_excess(step: CompiledStep) -> str:
    needed, limit, batch, largest = step.needed, step.limit, step.per_replica, step.largest
    examples = "the step" if batch is None else f"{count(int(batch), 'example')} per replica"
    text = f"does not fit into a core's memory: {examples}"
    if limit is not None:
        text += f" with {gib(limit)} of HBM" if needed is None else f" take {gib(needed)} of {gib(limit)}"
        text += "" if needed is None else f" of HBM, {gib(needed - limit)} too much"
    if largest:
        text += f"; {int(largest)} fit" + (f" ({int(step.refused)} do not)" if step.refused else "")
    elif largest == 0:
        text += "; not even one fits"
    return f"{text}; compiled, not run"


def _describe_fit(step: CompiledStep, layout: SliceLayout) -> Iterator[str]:
    if step.needed is not None and step.limit is not None:
        free = gib(step.limit - step.needed)
        yield f"fits, {gib(step.needed)} of {gib(step.limit)} of HBM per core, {free} free"
    else:
        yield "fits"
    if (bound := _bound(step, layout)) is not None:
        at_best = f"a step takes {milliseconds(bound.seconds)} at best, bound by {bound.by}"
        yield f"{at_best}: MFU at most {bound.utilisation:.0%}"
    if step.found:
        yield f"found: {', '.join(step.found[:_MOST_FINDINGS])}"
    yield "compiled, not run"


def _bound(step: CompiledStep, layout: SliceLayout) -> Bound | None:
    generation = generations().get(layout.shape.generation)
    if generation is None or step.flops is None or step.model_flops is None or not step.traffic:
        return None
    collectives = [StepCollective(kind, int(size)) for kind, size in step.exchanged.items()]
    return bound_of(
        StepCost(step.flops, step.model_flops, int(step.traffic), collectives), generation, layout.shape.devices
    )


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**27 else f"{size / 2**20:.1f} MiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
