"""The global batch on the slice, and how it is divided: replicas x per replica x accumulation = global."""

from dataclasses import dataclass
from math import isqrt

from tpu_training_operator.api.recipe import BatchScaling, Recipe
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.ledger import Ledger

# The chips compute in tiles of 8 x 128 and pad any other batch to the next multiple.
_TILE = 8


@dataclass(frozen=True)
class ScaledBatch:
    """Each replica computes `per_replica` examples at once, `accumulation` times before a step; `total` per step."""

    per_replica: int
    accumulation: int
    total: int


def scaled_batch(recipe: Recipe, tuned_replicas: int, replicas: int, ledger: Ledger) -> ScaledBatch:
    """Returns the recipe's batch on `replicas`. Raises InvalidJob if it does not divide evenly."""
    tuned, rest = divmod(recipe.global_batch_size, tuned_replicas)
    if rest or tuned == 0:
        raise _indivisible(recipe.global_batch_size, tuned_replicas, "of the slice it was tuned on")
    if recipe.scaling.batch is BatchScaling.GLOBAL_CONSTANT:
        batch = _global_constant(recipe.global_batch_size, tuned, replicas, ledger)
    else:
        batch = ScaledBatch(tuned, 1, tuned * replicas)
        ledger.note(
            "globalBatchSize",
            f"{tuned} per replica x {count(replicas, 'replica')} = {batch.total}"
            f" (was {recipe.global_batch_size} on {tuned_replicas}; the per-replica batch is kept)",
        )
    if batch.per_replica % _TILE:
        ledger.warn(f"the per-replica batch of {batch.per_replica} is not a multiple of {_TILE}; the chips pad it")
    return batch


def spread(batch: ScaledBatch, replicas: int, ledger: Ledger) -> ScaledBatch:
    """Returns the same global batch divided over other replicas. Raises InvalidJob if it does not divide."""
    return _global_constant(batch.total, batch.per_replica, replicas, ledger)


def _global_constant(total: int, tuned_per_replica: int, replicas: int, ledger: Ledger) -> ScaledBatch:
    share, rest = divmod(total, replicas)
    if rest or share == 0:
        raise _indivisible(total, replicas, "of this slice")
    # A replica held this many at once when the recipe was tuned; more might not fit into its memory.
    accumulation = share // _largest_divisor(share, tuned_per_replica)
    at_once = share // accumulation
    times = f" x {accumulation} accumulated" if accumulation > 1 else ""
    ledger.note("globalBatchSize", f"{total} is kept = {at_once} per replica x {count(replicas, 'replica')}{times}")
    return ScaledBatch(at_once, accumulation, total)


def _largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of `number` up to `most`, in at most 46,000 steps; trying all takes minutes."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return max(n for n in (*small, *(number // n for n in small)) if n <= most)


def _indivisible(batch: int, replicas: int, of_what: str) -> InvalidJob:
    below = batch // replicas * replicas
    nearest = f"{below} or {below + replicas}" if below else str(replicas)
    message = f"{batch} does not divide over the {count(replicas, 'replica')} {of_what}; nearest: {nearest}"
    return InvalidJob([Problem("spec.recipe.globalBatchSize", message)])
