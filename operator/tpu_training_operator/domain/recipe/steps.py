"""What is counted in steps, kept in examples: training, warm-up, milestones, evaluation."""

from fractions import Fraction
from math import ceil

from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.domain.recipe.ledger import Ledger

# The largest number that every reader of JSON takes exactly; `trainSteps` in the API has the same bound.
_MOST_STEPS = 2**53
_LARGEST_DROPPED_SHARE = Fraction(1, 100)
# Warm-up for a recipe that has none: Goyal et al. 2017 take five epochs; a short training gets a twentieth.
_ADDED_WARMUP_EPOCHS = 5
_ADDED_WARMUP_SHARE = Fraction(1, 20)


def train_steps(recipe: Recipe, batch: int, ledger: Ledger) -> int:
    """Raises InvalidJob when an epoch does not hold one batch, or the steps are too many to count."""
    if recipe.train_steps is not None:
        return _countable("trainSteps", _from_steps(recipe, recipe.train_steps, batch, ledger))
    return _countable("epochs", _from_epochs(recipe.epochs or 0, recipe.dataset_size or 0, batch, ledger))


def _countable(field: str, steps: int) -> int:
    if steps > _MOST_STEPS:
        message = f"these are {steps} steps on this slice; the most is {_MOST_STEPS}"
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
        message = f"{dataset} examples are fewer than one global batch of {batch}; use a smaller slice or batch"
        raise InvalidJob([Problem("spec.recipe.datasetSize", message)])
    steps = epochs * per_epoch
    ledger.note("trainSteps", f"{epochs} epochs x floor({dataset} / {batch}) = {steps} (epochs are kept)")
    if Fraction(dropped, dataset) > _LARGEST_DROPPED_SHARE:
        ledger.warn(f"every epoch drops {dropped} of {dataset} examples ({dropped / dataset:.1%}), the last batch")
    return steps


def warmup_steps(recipe: Recipe, batch: int, steps: int, ledger: Ledger) -> int:
    """The recipe's warm-up in examples; on a larger batch than the recipe's one is added if it has none."""
    if recipe.warmup_steps is not None:
        warmup = _countable("warmupSteps", in_examples(recipe.warmup_steps, recipe, batch))
        if warmup and batch != recipe.global_batch_size:
            factor = Fraction(recipe.global_batch_size, batch)
            ledger.note("warmupSteps", f"{recipe.warmup_steps} x {factor} = {warmup} (the same examples, rounded up)")
    elif batch > recipe.global_batch_size:
        warmup = ceil(steps * _ADDED_WARMUP_SHARE)
        why = "5 % of the training"
        if recipe.dataset_size is not None and _ADDED_WARMUP_EPOCHS * (recipe.dataset_size // batch) < warmup:
            warmup, why = _ADDED_WARMUP_EPOCHS * (recipe.dataset_size // batch), "5 epochs"
        ledger.note("warmupSteps", f"{why} = {warmup}, added: the recipe has none and its batch has grown")
    else:
        warmup = 0
    if warmup > steps:
        ledger.warn(f"warm-up takes {warmup} steps, but the training ends after {steps}")
    return warmup


def evaluate_every(recipe: Recipe, batch: int, ledger: Ledger) -> int | None:
    if recipe.evaluate_every_steps is None:
        return None
    scaled = round(Fraction(recipe.evaluate_every_steps * recipe.global_batch_size, batch))
    every = _countable("evaluateEverySteps", max(1, scaled))
    ledger.note("evaluateEverySteps", f"every {recipe.evaluate_every_steps} steps of the recipe = every {every}")
    return every


def milestones(recipe: Recipe, batch: int, ledger: Ledger) -> list[int]:
    tuned = recipe.schedule.milestones or []
    scaled = [_countable("schedule.milestones", in_examples(milestone, recipe, batch)) for milestone in tuned]
    if scaled and scaled != tuned:
        ledger.note("milestones", f"{_listed(tuned)} = {_listed(scaled)} (the same examples, rounded up)")
    return scaled


def in_examples(steps: int, recipe: Recipe, batch: int) -> int:
    """Steps of the recipe as steps of `batch`, rounded up."""
    return ceil(Fraction(steps * recipe.global_batch_size, batch))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
