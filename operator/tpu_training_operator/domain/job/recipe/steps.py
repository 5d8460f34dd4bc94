"""Everything that a recipe counts in steps: training, warm-up, milestones, evaluation.

The examples stay the same, or grow with those that the same loss takes (scaling.steps SameLoss); then every part of the
training grows with them.
"""

from fractions import Fraction
from math import ceil

from tpu_training_operator.api.model import LARGEST_COUNT
from tpu_training_operator.api.recipe import Recipe, StepsScaling
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.ledger import Ledger
from tpu_training_operator.domain.job.recipe.noise_scale import examples_multiplier
from tpu_training_operator.domain.job.recipe.optimizers import rule_of

_LARGEST_DROPPED_SHARE = Fraction(1, 100)
# Warm-up for a recipe without one: five epochs (Goyal et al. 2017), or a twentieth of a short training.
_ADDED_WARMUP_EPOCHS = 5
_ADDED_WARMUP_SHARE = Fraction(1, 20)
_LARGEST_ROUNDING = Fraction(1, 10)


def check_data(recipe: Recipe, batch: int) -> None:
    """Raises InvalidJob if the data set does not fill a batch: the trainer drops incomplete ones."""
    if recipe.dataset_size is not None and recipe.dataset_size < batch:
        message = (
            f"{count(recipe.dataset_size, 'example')} are fewer than one global batch of {batch}; use a smaller slice"
            " or batch"
        )
        raise InvalidJob([Problem("spec.recipe.datasetSize", message)])


def train_steps(recipe: Recipe, batch: int, ledger: Ledger) -> int:
    """Returns the steps of the training. Raises InvalidJob for too many."""
    if recipe.train_steps is not None:
        return _check_steps("trainSteps", _from_steps(recipe, recipe.train_steps, batch, ledger))
    return _check_steps("epochs", _from_epochs(recipe, recipe.epochs or 0, batch, ledger))


def _check_steps(field: str, steps: int) -> int:
    if steps > LARGEST_COUNT:
        message = f"comes to {steps} steps on this slice; the maximum is {LARGEST_COUNT}"
        raise InvalidJob([Problem(f"spec.recipe.{field}", message)])
    return steps


def _from_steps(recipe: Recipe, tuned_steps: int, batch: int, ledger: Ledger) -> int:
    steps = _rescale(tuned_steps, recipe, batch)
    more = steps * batch - tuned_steps * recipe.global_batch_size
    extra = f", {abs(more)} {'more' if more > 0 else 'fewer'} than the recipe's" if more else ", as in the recipe"
    ledger.note(
        "trainSteps",
        f"{tuned_steps} x {recipe.global_batch_size} / {batch}{_times(recipe, batch)} = {steps}"
        f" ({steps * batch} examples{extra}{_same_loss(recipe, batch)})",
    )
    return steps


def _from_epochs(recipe: Recipe, epochs: int, batch: int, ledger: Ledger) -> int:
    dataset, times = recipe.dataset_size or 0, _times(recipe, batch)
    dropped = dataset % batch
    steps = _in_epochs(epochs, recipe, batch)
    kept = f"{steps * batch} examples" if times else "the epochs are kept"
    ledger.note(
        "trainSteps",
        f"{count(epochs, 'epoch')} x floor({dataset} / {batch}){times} = {steps} ({kept}{_same_loss(recipe, batch)})",
    )
    if Fraction(dropped, dataset) > _LARGEST_DROPPED_SHARE:
        share = f"{dropped / dataset:.1%}"
        ledger.warn(f"every epoch drops its last, incomplete batch: {dropped} of {count(dataset, 'example')} ({share})")
    return steps


def warmup_steps(recipe: Recipe, batch: int, steps: int, ledger: Ledger) -> int:
    """Returns the recipe's warm-up over the same examples. Adds one if the recipe has none and the batch grows."""
    tuned, epochs, rule = recipe.warmup_steps, recipe.warmup_epochs, rule_of(recipe.optimizer.name)
    if epochs is not None:
        warmup = _check_steps("warmupEpochs", _in_epochs(epochs, recipe, batch))
        ledger.note("warmupSteps", f"{count(epochs, 'epoch')}{_times(recipe, batch)} = {warmup}")
    elif tuned is not None and rule is not None and rule.keeps_warmup_steps:
        warmup = tuned
        ledger.note("warmupSteps", f"{tuned} are kept: their examples grow with the batch ({rule.source})")
    elif tuned is not None:
        warmup = _check_steps("warmupSteps", _rescale(tuned, recipe, batch))
        if warmup and batch != recipe.global_batch_size:
            factor = Fraction(recipe.global_batch_size, batch)
            same = f"{_times(recipe, batch)} = {warmup} ({_same(recipe, batch)}, rounded up)"
            ledger.note("warmupSteps", f"{tuned} x {factor}{same}")
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


def evaluate_every(recipe: Recipe, batch: int, ledger: Ledger) -> tuple[int | None, Fraction]:
    """Returns the steps between evaluations, and by how much rounding stretches them."""
    tuned, epochs = recipe.evaluate_every_steps, recipe.evaluate_every_epochs
    if epochs is not None:
        every = _check_steps("evaluateEveryEpochs", _in_epochs(epochs, recipe, batch))
        ledger.note("evaluateEverySteps", f"every {count(epochs, 'epoch')}{_times(recipe, batch)} = every {every}")
        return every, Fraction(1)
    if tuned is None:
        return None, Fraction(1)
    exact = Fraction(tuned * recipe.global_batch_size, batch) * _longer(recipe, batch)
    every = _check_steps("evaluateEverySteps", max(1, round(exact)))
    ledger.note("evaluateEverySteps", f"every {count(tuned, 'step')} of the recipe = every {every}")
    if abs(every / exact - 1) > _LARGEST_ROUNDING:
        ledger.warn(
            f"evaluateEverySteps {tuned} would be {float(exact):.3g} steps on this slice and is rounded to {every};"
            " a larger recipe.evaluateEverySteps, or recipe.evaluateEveryEpochs, keeps the examples between evaluations"
        )
    return every, every / exact


def scaled_patience(field: str, tuned: int | None, stretched: Fraction, ledger: Ledger) -> int | None:
    """Returns the evaluations in which as many examples pass as in the recipe's patience."""
    if tuned is None:
        return None
    scaled = max(1, round(tuned / stretched))
    if scaled != tuned:
        ledger.note(
            field, f"patience {tuned} = {scaled} evaluations, which are {float(stretched):.3g} times as far apart"
        )
    return scaled


def milestones(recipe: Recipe, batch: int, ledger: Ledger) -> list[int]:
    if recipe.schedule.milestone_epochs is not None:
        return _ends_of_epochs(recipe.schedule.milestone_epochs, recipe, batch, ledger)
    tuned = recipe.schedule.milestones or []
    scaled = [_check_steps("schedule.milestones", _rescale(milestone, recipe, batch)) for milestone in tuned]
    if scaled and scaled != tuned:
        factor = f"{Fraction(recipe.global_batch_size, batch)}{_times(recipe, batch)}"
        ledger.note("milestones", f"{_join(tuned)} x {factor} = {_join(scaled)} ({_same(recipe, batch)}, rounded up)")
    return scaled


def _ends_of_epochs(epochs: list[int], recipe: Recipe, batch: int, ledger: Ledger) -> list[int]:
    """Returns the steps at which the epochs end, in whole batches, as the training counts its epochs."""
    steps = [_check_steps("schedule.milestoneEpochs", _in_epochs(epoch, recipe, batch)) for epoch in epochs]
    times = _times(recipe, batch)
    per_epoch = f"floor({recipe.dataset_size} / {batch}){times}"
    kept = _same(recipe, batch) if times else "the epochs are kept"
    ledger.note("milestones", f"epochs {_join(epochs)} x {per_epoch} = {_join(steps)} ({kept})")
    return steps


def _in_epochs(epochs: int, recipe: Recipe, batch: int) -> int:
    """Returns the steps of `batch` that the recipe's epochs take, each of whole batches."""
    return ceil(epochs * ((recipe.dataset_size or 0) // batch) * _longer(recipe, batch))


def _rescale(steps: int, recipe: Recipe, batch: int) -> int:
    """Returns the steps of `batch` that make as much of the training as the recipe's steps, rounded up."""
    return ceil(Fraction(steps * recipe.global_batch_size, batch) * _longer(recipe, batch))


def _predicted(recipe: Recipe, batch: int) -> Fraction:
    """Returns how many times the recipe's examples the same loss takes, as far as a noise scale is known."""
    noise = recipe.gradient_noise_scale
    return Fraction(1) if noise is None else examples_multiplier(Fraction(noise), recipe.global_batch_size, batch)


def _longer(recipe: Recipe, batch: int) -> Fraction:
    """Returns how many times the recipe's examples the training sees."""
    return _predicted(recipe, batch) if recipe.scaling.steps is StepsScaling.SAME_LOSS else Fraction(1)


def _times(recipe: Recipe, batch: int) -> str:
    longer = _longer(recipe, batch)
    return "" if longer == 1 else f" x {float(longer):.3g}"


def _same(recipe: Recipe, batch: int) -> str:
    return "the same share of the training" if _times(recipe, batch) else "the same examples"


def _same_loss(recipe: Recipe, batch: int) -> str:
    predicted = _predicted(recipe, batch)
    return "" if predicted == 1 else f"; the same loss takes about {float(predicted):.3g} times the recipe's"


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
