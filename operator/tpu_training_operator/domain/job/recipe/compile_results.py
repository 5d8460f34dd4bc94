"""What the TPU's compiler says about a job's step, read from the message of the entry check's pod and put into words.

The operator does not control the pod's image, so the message can have any form.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.api.text import plain
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.bound import Bound, StepCollective, StepCost, bound_of
from tpu_training_operator.domain.job.topology import SliceLayout

_LARGEST = 2**62
_LONGEST = 300
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


def read_compile_result(part: Any, layout: SliceLayout) -> CompileResult:
    """Reads the part of the message that is about the step on this slice."""
    fields = part if isinstance(part, Mapping) else {"trouble": "Ended", "said": "the pod's message cannot be read"}
    trouble = _text(fields, "trouble")
    if trouble or not isinstance(fields.get("fits"), bool):
        return CompileResult(None, f"{layout}: {_describe_unknown(fields, trouble)}", trouble)
    if not fields["fits"]:
        return CompileResult(False, f"{layout}: {_describe_excess(fields)}")
    return CompileResult(True, f"{layout}: {'; '.join(_describe_fit(fields, layout))}")


def _describe_unknown(fields: Mapping[str, Any], trouble: str) -> str:
    if trouble:
        detail = _text(fields, "said")
        return _TROUBLES.get(trouble, _CANNOT_TRACE) + (f": {detail}" if detail else "")
    if refusal := _text(fields, "refusal"):
        return f"the compiler refuses the step: {refusal}"
    return f"it cannot be one program: {', '.join(_findings(fields)) or 'no reason given'}"


def _describe_excess(fields: Mapping[str, Any]) -> str:
    needed, limit = _number(fields, "needed"), _number(fields, "limit")
    batch, largest, refused = (_number(fields, name) for name in ("perReplica", "largest", "refused"))
    examples = "the step" if batch is None else f"{count(int(batch), 'example')} per replica"
    text = f"does not fit into a core's memory: {examples}"
    if limit is not None:
        text += f" with {gib(limit)} of HBM" if needed is None else f" take {gib(needed)} of {gib(limit)}"
        text += "" if needed is None else f" of HBM, {gib(needed - limit)} too much"
    if largest:
        text += f"; {int(largest)} fit" + (f" ({int(refused)} do not)" if refused else "")
    elif largest == 0:
        text += "; not even one fits"
    return f"{text}; compiled, not run"


def _describe_fit(fields: Mapping[str, Any], layout: SliceLayout) -> Iterator[str]:
    needed, limit = _number(fields, "needed"), _number(fields, "limit")
    if needed is not None and limit is not None:
        yield f"fits, {gib(needed)} of {gib(limit)} of HBM per core, {gib(limit - needed)} free"
    else:
        yield "fits"
    if (bound := _bound(fields, layout)) is not None:
        at_best = f"a step takes {milliseconds(bound.seconds)} at best, bound by {bound.by}"
        yield f"{at_best}: MFU at most {bound.utilisation:.0%}"
    if findings := _findings(fields):
        yield f"found: {', '.join(findings)}"
    yield "compiled, not run"


def _bound(fields: Mapping[str, Any], layout: SliceLayout) -> Bound | None:
    generation = generations().get(layout.shape.generation)
    flops, model_flops, traffic = (_number(fields, name) for name in ("flops", "modelFlops", "traffic"))
    if generation is None or flops is None or model_flops is None or not traffic:
        return None
    part = fields.get("exchanged")
    sizes = part if isinstance(part, Mapping) else {}
    collectives = [StepCollective(str(kind), int(_number(sizes, kind) or 0)) for kind in sizes]
    return bound_of(StepCost(flops, model_flops, int(traffic), collectives), generation, layout.shape.devices)


def _findings(fields: Mapping[str, Any]) -> list[str]:
    part = fields.get("found")
    texts = [text for text in part if isinstance(text, str)] if isinstance(part, list) else []
    return [plain(text)[:_LONGEST] for text in texts[:_MOST_FINDINGS]]


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A NaN is in no range.
    return value if 0 <= value < _LARGEST else None


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return plain(value)[:_LONGEST] if isinstance(value, str) else ""


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**27 else f"{size / 2**20:.1f} MiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
