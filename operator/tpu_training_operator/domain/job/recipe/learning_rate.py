"""The learning rate on a larger or smaller batch.

With a measured gradient noise scale the rate follows its prediction: the one for SGD, and the square root of that for
adaptive optimizers, whose best power lies between 1/2 and 1 (McCandlish et al. 2018, section 2.2 and appendix E.2).

Without one, SGD follows the linear rule where it is known to hold (Goyal et al. 2017): to four times the batch, or to
8192 examples of a data set of a million. Beyond, the rate grows no further. Adaptive optimizers follow the square root
everywhere (`optimizers.py` names the sources). No rule holds for every model and batch (Shallue et al. 2019), so the
result is a starting point.
"""

from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

from tpu_training_operator.api.decimals import readable
from tpu_training_operator.api.recipe import LearningRateScaling, Recipe
from tpu_training_operator.domain.job.recipe.ledger import TEN_DIGITS, Ledger, decimal, plain
from tpu_training_operator.domain.job.recipe.noise_scale import best_multiplier
from tpu_training_operator.domain.job.recipe.optimizers import OptimizerRule, rule_of

# From `make bench-recipes`: at 16 times the batch a tuned recipe of SGD nearly keeps its quality with 4 times its rate,
# and falls apart with 8 times.
FURTHEST_LINEAR = 4
# ResNet-50 on ImageNet: 256 to 8192 examples with five epochs of warm-up. Of 90 epochs, 5 % are four and a half.
LARGEST_PUBLISHED_BATCH = 8192
_SMALLEST_PUBLISHED_DATA = 1_000_000
PUBLISHED_WARMUP_EPOCHS = Fraction(9, 2)
# A noise scale is an estimate: more digits would promise too much.
_THREE_DIGITS = Context(prec=3)


@dataclass(frozen=True)
class LearningRate:
    """`multiplier`: the rate divided by the recipe's, after any cap; the rule for weight decay uses it."""

    value: Decimal
    multiplier: Decimal


def scaled_learning_rate(recipe: Recipe, batch: int, warmup: int, ledger: Ledger) -> LearningRate:
    base = Decimal(recipe.optimizer.learning_rate)
    multiplier, why = _multiplier(recipe, batch, warmup, ledger)
    # An unscaled rate keeps every digit that the user wrote.
    rate = base if multiplier == 1 else TEN_DIGITS.multiply(base, multiplier)
    ledger.note("learningRate", f"{plain(base)} x {plain(multiplier)} = {plain(rate)} ({why})")
    limit = recipe.scaling.max_learning_rate
    if limit is not None and rate > Decimal(limit):
        rate = Decimal(limit)
        multiplier = TEN_DIGITS.divide(rate, base)
        ledger.note("learningRate", f"capped at maxLearningRate {plain(rate)}")
    return LearningRate(rate, multiplier)


def noise_scale_multiplier(noise: str, rule: OptimizerRule, tuned: int, batch: int) -> Decimal:
    """Returns the multiplier that a noise scale predicts for an optimizer."""
    best = decimal(best_multiplier(Fraction(noise), tuned, batch))
    return _THREE_DIGITS.plus(best if rule.linear else TEN_DIGITS.sqrt(best))


def is_published_linear(recipe: Recipe, batch: int, warmup: int) -> bool:
    """Returns whether the linear rule was published to hold for such a training, warm-up included."""
    data, rule = recipe.dataset_size or 0, rule_of(recipe.optimizer.name)
    if rule is None or not rule.linear or data < _SMALLEST_PUBLISHED_DATA or batch > LARGEST_PUBLISHED_BATCH:
        return False
    return warmup >= PUBLISHED_WARMUP_EPOCHS * (data // batch)


def _multiplier(recipe: Recipe, batch: int, warmup: int, ledger: Ledger) -> tuple[Decimal, str]:
    """Returns the multiplier of the rate, and the rule in words."""
    factor = decimal(Fraction(batch, recipe.global_batch_size))
    match recipe.scaling.learning_rate:
        case LearningRateScaling.LINEAR:
            return factor, "linear rule, as requested"
        case LearningRateScaling.SQUARE_ROOT:
            return TEN_DIGITS.sqrt(factor), "square-root rule, as requested"
        case LearningRateScaling.UNSCALED:
            return Decimal(1), "unscaled, as requested"
        case LearningRateScaling.ADA_SCALE:
            return Decimal(1), f"AdaScale: and times each step's gain, between 1 and {plain(factor)}"
        case LearningRateScaling.AUTO:
            return _automatic(recipe, batch, warmup, ledger)


def _automatic(recipe: Recipe, batch: int, warmup: int, ledger: Ledger) -> tuple[Decimal, str]:
    name, noise, tuned = recipe.optimizer.name, recipe.gradient_noise_scale, recipe.global_batch_size
    rule, factor = rule_of(name), decimal(Fraction(batch, tuned))
    if rule is None:
        if factor != 1:
            ledger.warn(
                f"the learning rate is not scaled, because no rule is known for optimizer {name!r};"
                " set recipe.scaling.learningRate to Linear, SquareRoot or Unscaled"
            )
        return Decimal(1), f"unscaled, no rule known for {name}"
    if noise is not None:
        power = "" if rule.linear else f", to the power 1/2 for {name.lower()}"
        where = "beyond" if batch > Fraction(noise) else "within"
        why = f"noise scale {readable(noise)}: {batch} is {where} it{power}"
        return noise_scale_multiplier(noise, rule, tuned, batch), why
    if not rule.linear:
        return TEN_DIGITS.sqrt(factor), f"square-root rule, the usual one for {name.lower()}"
    if factor <= FURTHEST_LINEAR or is_published_linear(recipe, batch, warmup):
        return factor, f"linear rule, the usual one for {name.lower()}"
    return Decimal(FURTHEST_LINEAR), f"linear rule, up to {FURTHEST_LINEAR} times the rate"
