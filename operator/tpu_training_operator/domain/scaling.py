"""The recipe scaled from the slice it was tuned on to the slice it runs on. Called by `domain.resolve`.

With N replicas on the tuned slice, N' on this one, B the global batch and kappa = N'/N:

    batch       B' = kappa B             every replica keeps its batch B/N
    steps       S' = ceil(S B / B')      the same examples are seen; epochs stay, steps per epoch = floor(D / B')
    warm-up     W' = ceil(W B / B')      warm-up is a number of examples, too
    rate        kappa eta or sqrt(kappa) eta

Sources: Google's "Training on TPU Pods" for batch and steps (1024 on v2-8 becomes 4096 on v2-32, 1000 steps become
250); Goyal et al. 2017 for the linear rule of SGD; Krizhevsky 2014 and Malladi et al. 2022 for the square root of
adaptive optimizers. A scaled learning rate is a starting point, not a tuned one.
"""

from dataclasses import dataclass, field
from decimal import Context, Decimal
from fractions import Fraction
from math import ceil

from tpu_training_operator.api.recipe import LearningRateScaling, Optimizer, Recipe
from tpu_training_operator.api.validation import InvalidJob, Problem

_LINEAR_OPTIMIZERS = frozenset({"sgd"})
_SQUARE_ROOT_OPTIMIZERS = frozenset({"adam", "adamw", "rmsprop", "adafactor", "lion"})

# Beyond this factor the linear rule without warm-up is known to diverge (Goyal et al. 2017, section 2.2).
_LARGEST_LINEAR_FACTOR_WITHOUT_WARMUP = 8
_LARGEST_DROPPED_SHARE = Fraction(1, 100)
_TEN_DIGITS = Context(prec=10)


@dataclass(frozen=True)
class ScaledRecipe:
    """What the job trains with. `notes` give the rule behind each number, `warnings` what to look at twice."""

    per_replica_batch_size: int
    global_batch_size: int
    train_steps: int
    warmup_steps: int
    learning_rate: Decimal
    factor: Fraction
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def scale(recipe: Recipe, tuned_replicas: int, replicas: int) -> ScaledRecipe:
    """The recipe for `replicas`, tuned on `tuned_replicas`. Raises InvalidJob where the batch cannot be divided."""
    notes: list[str] = []
    warnings: list[str] = []
    per_replica = _per_replica_batch(recipe, tuned_replicas)
    batch = per_replica * replicas
    factor = Fraction(replicas, tuned_replicas)
    notes.append(
        f"globalBatchSize: {per_replica} per replica x {replicas} replicas = {batch}"
        f" (was {recipe.global_batch_size} on {tuned_replicas}; the per-replica batch is kept)"
    )
    steps = _train_steps(recipe, batch, notes, warnings)
    warmup = ceil(Fraction(recipe.warmup_steps * recipe.global_batch_size, batch))
    if recipe.warmup_steps and factor != 1:
        notes.append(f"warmupSteps: {recipe.warmup_steps} x {1 / factor} = {warmup} (the same examples, rounded up)")
    if warmup > steps:
        warnings.append(f"warm-up takes {warmup} steps, but the training ends after {steps}")
    rate = _learning_rate(recipe, factor, notes, warnings)
    return ScaledRecipe(per_replica, batch, steps, warmup, rate, factor, notes, warnings)


def _per_replica_batch(recipe: Recipe, tuned_replicas: int) -> int:
    per_replica, rest = divmod(recipe.global_batch_size, tuned_replicas)
    if rest or per_replica == 0:
        below, above = per_replica * tuned_replicas, (per_replica + 1) * tuned_replicas
        nearest = f"{below} or {above}" if below else str(above)
        raise InvalidJob(
            [
                Problem(
                    "spec.recipe.globalBatchSize",
                    f"{recipe.global_batch_size} does not divide over the {tuned_replicas} replicas of the slice"
                    f" it was tuned on; nearest: {nearest}",
                )
            ]
        )
    return per_replica


def _train_steps(recipe: Recipe, batch: int, notes: list[str], warnings: list[str]) -> int:
    if recipe.train_steps is not None:
        examples = recipe.train_steps * recipe.global_batch_size
        steps = ceil(Fraction(examples, batch))
        overshoot = steps * batch - examples
        extra = f", {overshoot} more than the recipe's" if overshoot else ", as in the recipe"
        notes.append(
            f"trainSteps: {recipe.train_steps} x {recipe.global_batch_size} / {batch} = {steps}"
            f" ({steps * batch} examples{extra})"
        )
        return steps
    epochs, dataset = recipe.epochs or 0, recipe.dataset_size or 0
    per_epoch, dropped = divmod(dataset, batch)
    if per_epoch == 0:
        raise InvalidJob(
            [
                Problem(
                    "spec.recipe.datasetSize",
                    f"{dataset} examples are fewer than one global batch of {batch}; use a smaller slice or batch",
                )
            ]
        )
    notes.append(f"trainSteps: {epochs} epochs x floor({dataset} / {batch}) = {epochs * per_epoch} (epochs are kept)")
    if Fraction(dropped, dataset) > _LARGEST_DROPPED_SHARE:
        warnings.append(f"every epoch drops {dropped} of {dataset} examples ({dropped / dataset:.1%}), the last batch")
    return epochs * per_epoch


def _learning_rate(recipe: Recipe, factor: Fraction, notes: list[str], warnings: list[str]) -> Decimal:
    base = Decimal(recipe.optimizer.learning_rate)
    rule, why = _rule(recipe.scaling.learning_rate, recipe.optimizer, factor, warnings)
    multiplier = _multiplier(rule, factor)
    # Unscaled it stays as it was written, to the last digit.
    rate = base if multiplier == 1 else _TEN_DIGITS.multiply(base, multiplier)
    notes.append(f"learningRate: {plain(base)} x {plain(multiplier)} = {plain(rate)} ({why})")
    limit = recipe.scaling.max_learning_rate
    if limit is not None and rate > Decimal(limit):
        rate = Decimal(limit)
        notes.append(f"learningRate: held at maxLearningRate {plain(rate)}")
    if (
        rule is LearningRateScaling.LINEAR
        and factor > _LARGEST_LINEAR_FACTOR_WITHOUT_WARMUP
        and not recipe.warmup_steps
    ):
        warnings.append(
            f"the learning rate grows {plain(multiplier)}-fold without warm-up;"
            " set recipe.warmupSteps or scaling.maxLearningRate"
        )
    return rate


def _rule(
    wanted: LearningRateScaling, optimizer: Optimizer, factor: Fraction, warnings: list[str]
) -> tuple[LearningRateScaling, str]:
    if wanted is not LearningRateScaling.AUTO:
        return wanted, {
            LearningRateScaling.LINEAR: "linear rule, as asked",
            LearningRateScaling.SQUARE_ROOT: "square-root rule, as asked",
            LearningRateScaling.NONE: "unscaled, as asked",
        }[wanted]
    name = optimizer.name.lower()
    if name in _LINEAR_OPTIMIZERS:
        return LearningRateScaling.LINEAR, f"linear rule, the usual one for {name}"
    if name in _SQUARE_ROOT_OPTIMIZERS:
        return LearningRateScaling.SQUARE_ROOT, f"square-root rule, the usual one for {name}"
    if factor != 1:
        warnings.append(
            f"no scaling rule is known for optimizer {optimizer.name!r}: the learning rate is left as it is;"
            " set recipe.scaling.learningRate to Linear, SquareRoot or None"
        )
    return LearningRateScaling.NONE, f"unscaled, no rule known for {optimizer.name}"


def _multiplier(rule: LearningRateScaling, factor: Fraction) -> Decimal:
    ratio = _TEN_DIGITS.divide(Decimal(factor.numerator), Decimal(factor.denominator))
    if rule is LearningRateScaling.LINEAR:
        return ratio
    return _TEN_DIGITS.sqrt(ratio) if rule is LearningRateScaling.SQUARE_ROOT else Decimal(1)


def plain(number: Decimal) -> str:
    """The number without exponent or trailing zeros: 0.0004."""
    return format(number.normalize(), "f")
