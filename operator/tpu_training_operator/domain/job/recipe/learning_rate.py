"""The learning rate on a larger or smaller batch.

SGD follows the linear rule (Goyal et al. 2017), adaptive optimizers the square-root rule (Krizhevsky 2014; Malladi et
al. 2022). Adafactor divides by its second moment like Adam. Lion takes the sign, whose noise shrinks with the square
root of the batch, too. Neither rule holds for every model and batch (Shallue et al. 2019), so the result is a starting
point.
"""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from tpu_training_operator.api.recipe import LearningRateScaling, Optimizer, Recipe
from tpu_training_operator.domain.job.recipe.ledger import TEN_DIGITS, Ledger, decimal, plain

_LINEAR_OPTIMIZERS = frozenset({"sgd"})
_SQUARE_ROOT_OPTIMIZERS = frozenset({"adam", "adamw", "rmsprop", "adafactor", "lion"})

# Above this factor the linear rule is known to diverge without warm-up (Goyal et al. 2017, section 2.2).
_LARGEST_LINEAR_FACTOR_WITHOUT_WARMUP = 8


@dataclass(frozen=True)
class LearningRate:
    """`multiplier`: the rate divided by the recipe's, after any cap; the rule for weight decay uses it."""

    value: Decimal
    multiplier: Decimal


def scaled_learning_rate(recipe: Recipe, factor: Fraction, warmup: int, ledger: Ledger) -> LearningRate:
    base = Decimal(recipe.optimizer.learning_rate)
    rule, why = _rule(recipe.scaling.learning_rate, recipe.optimizer, factor, ledger)
    multiplier = _multiplier(rule, factor)
    # An unscaled rate keeps every digit that the user wrote.
    rate = base if multiplier == 1 else TEN_DIGITS.multiply(base, multiplier)
    ledger.note("learningRate", f"{plain(base)} x {plain(multiplier)} = {plain(rate)} ({why})")
    limit, capped = recipe.scaling.max_learning_rate, None
    if limit is not None and rate > Decimal(limit):
        rate = Decimal(limit)
        capped = TEN_DIGITS.divide(rate, base)
        ledger.note("learningRate", f"capped at maxLearningRate {plain(rate)}")
    too_steep = factor > _LARGEST_LINEAR_FACTOR_WITHOUT_WARMUP and warmup == 0
    if rule is LearningRateScaling.LINEAR and too_steep:
        ledger.warn(
            f"the learning rate grows {plain(multiplier)}-fold without warm-up;"
            " set recipe.warmupSteps or scaling.maxLearningRate"
        )
    return LearningRate(rate, multiplier if capped is None else capped)


def _rule(
    wanted: LearningRateScaling, optimizer: Optimizer, factor: Fraction, ledger: Ledger
) -> tuple[LearningRateScaling, str]:
    if wanted is not LearningRateScaling.AUTO:
        return wanted, {
            LearningRateScaling.LINEAR: "linear rule, as requested",
            LearningRateScaling.SQUARE_ROOT: "square-root rule, as requested",
            LearningRateScaling.UNSCALED: "unscaled, as requested",
        }[wanted]
    name = optimizer.name.lower()
    if name in _LINEAR_OPTIMIZERS:
        return LearningRateScaling.LINEAR, f"linear rule, the usual one for {name}"
    if name in _SQUARE_ROOT_OPTIMIZERS:
        return LearningRateScaling.SQUARE_ROOT, f"square-root rule, the usual one for {name}"
    if factor != 1:
        ledger.warn(
            f"the learning rate is not scaled, because no rule is known for optimizer {optimizer.name!r};"
            " set recipe.scaling.learningRate to Linear, SquareRoot or Unscaled"
        )
    return LearningRateScaling.UNSCALED, f"unscaled, no rule known for {optimizer.name}"


def _multiplier(rule: LearningRateScaling, factor: Fraction) -> Decimal:
    if rule is LearningRateScaling.LINEAR:
        return decimal(factor)
    return TEN_DIGITS.sqrt(decimal(factor)) if rule is LearningRateScaling.SQUARE_ROOT else Decimal(1)
