"""The slices that a job may run on, in order of preference: its own, then fewer of them, then the alternatives."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.placement import MoveBatch
from tpu_training_operator.api.slice import Slice


@dataclass(frozen=True)
class SliceChoice:
    """One of these slices. `number`: its place in the order of preference, 0 for spec.slice. `field`: where the spec
    names it. `keeps_batch`: the recipe is that of spec.slice, and only the batch is divided over the replicas of this
    slice. `wait_seconds`: how long the job waits for the choice before this one; 0 for spec.slice. `is_own`: the choice
    is spec.slice, or fewer slices of it."""

    number: int
    slice: Slice
    field: str
    keeps_batch: bool = True
    wait_seconds: int = 0
    is_own: bool = False

    @property
    def wait(self) -> timedelta:
        return timedelta(seconds=self.wait_seconds)


def own_choice(spec: Spec) -> SliceChoice:
    return SliceChoice(0, spec.slice, "spec.slice", is_own=True)


def fewer_slices(spec: Spec, counts: Iterable[int]) -> Iterator[SliceChoice]:
    """Yields spec.slice with each of these numbers of slices."""
    policy = spec.placement
    if policy is None or policy.count is None:
        return
    keeps_batch, fewer = policy.batch is MoveBatch.CONSTANT, policy.count
    for number, count in enumerate(counts, start=1):
        slices = Slice.model_validate(dict(spec.slice) | {"count": count})
        yield SliceChoice(
            number, slices, "spec.placement.count", keeps_batch, fewer.wait_for_previous_seconds, is_own=True
        )


def alternatives(spec: Spec, first: int) -> Iterator[SliceChoice]:
    policy = spec.placement
    if policy is None:
        return
    keeps_batch = policy.batch is MoveBatch.CONSTANT
    for index, other in enumerate(policy.alternatives or ()):
        field = f"spec.placement.alternatives[{index}].slice"
        yield SliceChoice(first + index, other.slice, field, keeps_batch, other.wait_for_previous_seconds)


def on_slice(spec: Spec, choice: SliceChoice) -> Spec:
    return Spec.model_validate(dict(spec) | {"slice": choice.slice})
