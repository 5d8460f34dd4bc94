"""What the TPU's compiler says about a job's step, read from the message of the entry check's pod and put into words.

The pod runs an image that anybody may have written, so its message can have any form.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.api.text import plain
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.bound import Bound, Exchanged, StepCost, bound_of
from tpu_training_operator.domain.job.topology import SliceLayout

_LARGEST = 2**62
_LONGEST = 300
_MOST_FOUND = 2

NOT_THERE = "Missing"
UNFINISHED = "Unfinished"
_TROUBLES = {
    NOT_THERE: "the image cannot compile it",
    UNFINISHED: "the pod ended while it was compiled",
    "TooSlow": "it was not read_compile_result in time",
    "Ended": "compiling ended without an answer",
    "UnknownSlice": "the image's libtpu does not know the slice",
}
_CANNOT_TRACE = "it cannot be traced"


@dataclass(frozen=True)
class CompileResult:
    """`fits`: None if nobody can tell, as `message` explains. `trouble`: what kept the compiler from an answer."""

    fits: bool | None
    message: str
    trouble: str = ""


def read_compile_result(said: Any, layout: SliceLayout) -> CompileResult:
    """`said`: of the step on this slice."""
    words = said if isinstance(said, Mapping) else {"trouble": "Ended", "said": "the pod's message cannot be read"}
    where, trouble = f"{layout}", _text(words, "trouble")
    if trouble or not isinstance(words.get("fits"), bool):
        return CompileResult(None, f"{where}: {_unknown(words, trouble)}", trouble)
    if not words["fits"]:
        return CompileResult(False, f"{where}: {_too_large(words)}")
    return CompileResult(True, f"{where}: {'; '.join(_fitting(words, layout))}")


def _unknown(words: Mapping[str, Any], trouble: str) -> str:
    if trouble:
        said = _text(words, "said")
        return _TROUBLES.get(trouble, _CANNOT_TRACE) + (f": {said}" if said else "")
    if refusal := _text(words, "refusal"):
        return f"the compiler refuses the step: {refusal}"
    return f"it cannot be one program: {', '.join(_found(words)) or 'nobody said why'}"


def _too_large(words: Mapping[str, Any]) -> str:
    needed, limit = _number(words, "needed"), _number(words, "limit")
    batch, largest, refused = (_number(words, name) for name in ("perReplica", "largest", "refused"))
    examples = "the step" if batch is None else f"{count(int(batch), 'example')} per replica"
    text = f"does not fit into a core's memory: {examples}"
    if limit is not None:
        text += f" with {gib(limit)} of HBM" if needed is None else f" take {gib(needed)} of {gib(limit)}"
        text += "" if needed is None else f" of HBM, {gib(needed - limit)} too much"
    if largest:
        text += f"; {int(largest)} fit" + (f" ({int(refused)} do not)" if refused else "")
    elif largest == 0:
        text += "; not even one fits"
    return f"{text}; read_compile_result, not run"


def _fitting(words: Mapping[str, Any], layout: SliceLayout) -> Iterator[str]:
    needed, limit = _number(words, "needed"), _number(words, "limit")
    if needed is not None and limit is not None:
        yield f"fits, {gib(needed)} of {gib(limit)} of HBM per core, {gib(limit - needed)} free"
    else:
        yield "fits"
    if (bound := _bound(words, layout)) is not None:
        at_best = f"a step takes {milliseconds(bound.seconds)} at best, bound by {bound.by}"
        yield f"{at_best}: MFU at most {bound.utilisation:.0%}"
    if found := _found(words):
        yield f"found: {', '.join(found)}"
    yield "compiled, not run"


def _bound(words: Mapping[str, Any], layout: SliceLayout) -> Bound | None:
    generation = generations().get(layout.shape.generation)
    flops, needs, traffic = (_number(words, name) for name in ("flops", "modelFlops", "traffic"))
    if generation is None or flops is None or needs is None or not traffic:
        return None
    given = words.get("exchanged")
    sizes = given if isinstance(given, Mapping) else {}
    exchanged = [Exchanged(str(kind), int(_number(sizes, kind) or 0)) for kind in sizes]
    return bound_of(StepCost(flops, needs, int(traffic), exchanged), generation, layout.shape.devices)


def _found(words: Mapping[str, Any]) -> list[str]:
    given = words.get("found")
    listed = given if isinstance(given, list) else []
    return [plain(one)[:_LONGEST] for one in listed if isinstance(one, str)][:_MOST_FOUND]


def _number(words: Mapping[str, Any], name: str) -> float | None:
    value = words.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Not a NaN either, which is in no range.
    return value if 0 <= value < _LARGEST else None


def _text(words: Mapping[str, Any], name: str) -> str:
    value = words.get(name)
    return plain(value)[:_LONGEST] if isinstance(value, str) else ""


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**27 else f"{size / 2**20:.1f} MiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
