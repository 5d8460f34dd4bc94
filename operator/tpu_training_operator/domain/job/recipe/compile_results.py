"""Puts into words what the TPU's compiler says about a job's step, for `tpujob compile-check`, `tpujob plan` and the
condition StepFits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.bound import Bound, bound_of
from tpu_training_operator.domain.job.topology import SliceLayout
from tpu_training_operator.domain.job.trainer_report import CompiledStep, CompileFinding

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
_FINDINGS = {
    "HostRead": "reads a number off the device: the step waits for it, and is cut into two programs",
    "DynamicShape": "has a result whose size depends on the data: every batch would be another program",
    "Fallback": "has no TPU kernel in torch_xla: it runs on the host's CPU, and cuts the step in two",
    "DifferentPrograms": "two batches make two programs: each new one is compiled, which takes as long as the first",
}


@dataclass(frozen=True)
class CompileResult:
    """The compile check's answer about a job's step on one slice."""

    layout: SliceLayout
    step: CompiledStep

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; None if it is not known."""
        return None if self.step.trouble else self.step.fits

    @property
    def short_verdict(self) -> str:
        return {True: "fits", False: "does not fit", None: "unknown"}[self.fits]

    @property
    def memory(self) -> str:
        """The memory that the step needs and may use, such as "5.38 GiB of 15.75 GiB"; "-" if that is not known."""
        needed, limit = self.step.memory.needed, self.step.memory.limit
        used = "-" if needed is None else gib(needed)
        return used if limit is None else f"{used} of {gib(limit)}"

    @property
    def verdict(self) -> str:
        step, needed, limit = self.step, self.step.memory.needed, self.step.memory.limit
        if step.trouble:
            return _TROUBLES.get(step.trouble, _CANNOT_TRACE) + (f": {step.said}" if step.said else "")
        if step.fits is None:
            return "the compiler refuses the step" if step.refusal else "cannot be one program"
        if step.fits:
            free = "" if limit is None or needed is None else f", {gib(limit - needed)} free"
            return "fits" if needed is None else f"fits: {self.memory} of HBM per core{free}"
        examples = count(int(step.batch.per_replica or 0), "example")
        if limit is None or needed is None:
            size = "HBM" if limit is None else f"{gib(limit)} of HBM"
            return f"does not fit: {examples} per replica need more than a core's {size}"
        excess = f"{gib(needed - limit)} too much"
        return f"does not fit: {examples} per replica need {self.memory} of HBM per core, {excess}"

    @property
    def largest_batch(self) -> str:
        """The largest batch that fits, in a sentence; "" if it was not searched."""
        largest = self.step.largest_batch
        if largest is None:
            return ""
        if not largest.fits:
            return "not even one example per replica fits"
        refused = "no larger one was refused" if largest.refused is None else f"{largest.refused:.0f} does not fit"
        total = largest.fits * self.step.replicas * self.step.batch.accumulation
        return f"largest batch per replica that fits: {largest.fits:.0f} ({refused}); {total:.0f} per slice and step"

    @property
    def bound(self) -> Bound | None:
        """The bounds of the step's speed; None if nothing was compiled, or for a slice of unknown speed."""
        generation, step = generations().get(self.layout.shape.generation), self.step.step
        if generation is None or step is None or not step.traffic:
            return None
        return bound_of(step, generation, self.layout.shape, self.layout.slices)

    @property
    def at_best(self) -> tuple[str, str]:
        """The shortest time of a step and the one without overlap, and what limits it; empty if they are not known."""
        bound = self.bound
        if bound is None:
            return "", ""
        return times(bound), f"bound by {bound.by}, MFU at most {bound.utilisation:.0%}"

    @property
    def findings(self) -> list[str]:
        return [_describe(finding) for finding in self.step.found]

    @property
    def message(self) -> str:
        """All of it in one line."""
        return f"{self.layout}: {'; '.join(filter(None, self._clauses()))}"

    def _clauses(self) -> Iterator[str]:
        refusal = "" if self.step.fits is not None else self.step.refusal
        yield f"{self.verdict}: {refusal}" if refusal else self.verdict
        yield self.largest_batch
        seconds, limits = self.at_best
        if seconds:
            yield f"step at best {seconds}, {limits}"
        yield from self.findings[:_MOST_FINDINGS]
        if self.fits is not None:
            yield "compiled, not run"


def _describe(finding: CompileFinding) -> str:
    where = f"{finding.where}: " if finding.where else ""
    shapes = f" ({finding.shapes})" if finding.shapes else ""
    return f"{where}{finding.operation} {_FINDINGS.get(finding.kind, finding.kind)}{shapes}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**27 else f"{size / 2**20:.1f} MiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def times(bound: Bound) -> str:
    return f"{milliseconds(bound.seconds)} ({milliseconds(bound.serial)} without overlap)"
