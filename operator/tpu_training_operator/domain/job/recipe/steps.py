"""Everything that a recipe counts in steps: training, warm-up, milestones, evaluation. The examples stay the same."""

from fractions import Fraction
from math import ceil

from tpu_training_operator.api.model import LARGEST_COUNT
from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.ledger import Ledger

_LARGEST_DROPPED_SHARE = Fraction(1, 100)
# Warm-up for a recipe without one: five epochs (Goyal et al. 2017), or a twentieth of a short training.
_ADDED_WARMUP_EPOCHS = 5
_ADDED_WARMUP_SHARE = Fraction(1, 20)


def train_steps(recipe: Recipe, batch: int, ledger: Ledger) -> int:
    """Returns the steps of the training. Raises InvalidJob for an epoch below a batch, and for too many steps."""
    if recipe.train_steps is not None:
        return _check_steps("trainSteps", _from_steps(recipe, recipe.train_steps, batch, ledger))
    return _check_steps("epochs", _from_epochs(recipe.epochs or 0, recipe.dataset_size or 0, batch, ledger))


def _check_steps(field: str, steps: int) -> int:
    if steps > LARGEST_COUNT:
        message = f"comes to {steps} steps on this slice; the maximum is {LARGEST_COUNT}"
        raise InvalidJob([Problem(f"spec.recipe.{field}", message)])
    return steps


def _from_steps(recipe: Recipe, tuned_steps: int, batch: int, ledger: Ledger) -> int:
    examples = tuned_steps * recipe.global_batch_size
    steps = ceil(Fraction(examples, batch))
    overshoot = steps * batch - examples
    extra = f", {overshoot} more than the recipe's" if overshoot else ", as in the recipe"
    ledger.note(
        "trainSteps",
        f"{tuned_steps} x {recipe.global_batch_size} / {batch} = {steps} ({steps * batch} examples{extra})",
    )
    return steps


def _from_epochs(epochs: int, dataset: int, batch: int, ledger: Ledger) -> int:
    per_epoch, dropped = divmod(dataset, batch)
    if per_epoch == 0:
        message = (
            f"{count(dataset, 'example')} are fewer than one global batch of {batch}; use a smaller slice or batch"
        )
        raise InvalidJob([Problem("spec.recipe.datasetSize", message)])
    steps = epochs * per_epoch
    ledger.note("trainSteps", f"{count(epochs, 'epoch')} x floor({dataset} / {batch}) = {steps} (the epochs are kept)")
    if Fraction(dropped, dataset) > _LARGEST_DROPPED_SHARE:
        share = f"{dropped / dataset:.1%}"
        ledger.warn(f"every epoch drops its last, incomplete batch: {dropped} of {count(dataset, 'example')} ({share})")
    return steps


def warmup_steps(recipe: Recipe, batch: int, steps: int, ledger: Ledger) -> int:
    """Returns the recipe's warm-up over the same examples. Adds one if the recipe has none and the batch grows."""
    if recipe.warmup_steps is not None:
        warmup = _check_steps("warmupSteps", _rescale(recipe.warmup_steps, recipe, batch))
        if warmup and batch != recipe.global_batch_size:
            factor = Fraction(recipe.global_batch_size, batch)
            ledger.note("warmupSteps", f"{recipe.warmup_steps} x {factor} = {warmup} (the same examples, rounded up)")
    elif batch > recipe.global_batch_size:
        warmup = ceil(steps * _ADDED_WARMUP_SHARE)
        why = "5 % of the training"
        if recipe.dataset_size is not None and _ADDED_WARMUP_EPOCHS * (recipe.dataset_size // batch) < warmup:
            warmup, why = _ADDED_WARMUP_EPOCHS * (recipe.dataset_size // batch), "5 epochs"
        ledger.note("warmupSteps", f"{why} = {warmup}, added because the recipe has none and its batch grows")
    else:
        warmup = 0
    if warmup > steps:
        ledger.warn(f"warm-up takes {count(warmup, 'step')}, but the training ends after {steps}")
    return warmup


def evaluate_every(recipe: Recipe, batch: int, ledger: Ledger) -> int | None:
    if recipe.evaluate_every_steps is None:
        return None
    scaled = round(Fraction(recipe.evaluate_every_steps * recipe.global_batch_size, batch))
    every = _check_steps("evaluateEverySteps", max(1, scaled))
    ledger.note(
        "evaluateEverySteps", f"every {count(recipe.evaluate_every_steps, 'step')} of the recipe = every {every}"
    )
    return every


def milestones(recipe: Recipe, batch: int, ledger: Ledger) -> list[int]:
    if recipe.schedule.milestone_epochs is not None:
        return _ends_of_epochs(recipe.schedule.milestone_epochs, recipe.dataset_size or 0, batch, ledger)
    tuned = recipe.schedule.milestones or []
    scaled = [_check_steps("schedule.milestones", _rescale(milestone, recipe, batch)) for milestone in tuned]
    if scaled and scaled != tuned:
        ledger.note("milestones", f"{_join(tuned)} = {_join(scaled)} (the same examples, rounded up)")
    return scaled


def _ends_of_epochs(epochs: list[int], dataset: int, batch: int, ledger: Ledger) -> list[int]:
    """Returns the steps at which the epochs end, in whole batches, as the training counts its epochs."""
    per_epoch = dataset // batch
    steps = [_check_steps("schedule.milestoneEpochs", epoch * per_epoch) for epoch in epochs]
    ledger.note(
        "milestones", f"epochs {_join(epochs)} x floor({dataset} / {batch}) = {_join(steps)} (the epochs are kept)"
    )
    return steps


def _rescale(steps: int, recipe: Recipe, batch: int) -> int:
    """Returns how many steps of `batch` have the examples of the recipe's steps, rounded up."""
    return ceil(Fraction(steps * recipe.global_batch_size, batch))


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
