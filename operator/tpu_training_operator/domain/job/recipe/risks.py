"""What a larger batch may cost in quality, said before it costs chips. Each warning names the field that ends it."""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil

from tpu_training_operator.api.recipe import LearningRateScaling, Recipe, StepsScaling
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.adascale import is_adaptive
from tpu_training_operator.domain.job.recipe.learning_rate import (
    FURTHEST_LINEAR,
    LARGEST_PUBLISHED_BATCH,
    PUBLISHED_WARMUP_EPOCHS,
    is_published_linear,
    noise_scale_multiplier,
)
from tpu_training_operator.domain.job.recipe.ledger import plain
from tpu_training_operator.domain.job.recipe.noise_scale import examples_multiplier
from tpu_training_operator.domain.job.recipe.optimizers import rule_of

# Judgements, from `make bench-recipes`: shorter trainings lose quality at twice the batch already.
_FEW_UPDATES = 1000
_LARGE_SHARE_OF_DATA = Fraction(1, 10)
_MORE_EXAMPLES = Fraction(6, 5)
_ABOVE_NOISE_SCALE = Decimal("1.5")
# Above this factor the linear rule is known to diverge without warm-up (Goyal et al. 2017, section 2.2).
_LARGEST_WITHOUT_WARMUP = 8
_SHORTEST_WARMUP = 10
_WARMUP_SHARE = 20

_MEASURE = "measure the gradient noise scale on the slice of tunedOn (tpujob run --measure-noise) and set"


@dataclass(frozen=True)
class LargerBatch:
    """The scaled numbers that are at risk. `multiplier`: of the learning rate, after any cap."""

    batch: int
    steps: int
    warmup: int
    multiplier: Decimal


def risks(recipe: Recipe, now: LargerBatch) -> Iterator[str]:
    """Yields a warning for each risk of a batch that is larger than the recipe's."""
    if now.batch <= recipe.global_batch_size:
        return
    if now.steps < _FEW_UPDATES:
        yield (
            f"the training makes {count(now.steps, 'update')}, fewer than {_FEW_UPDATES}, and may end before it has"
            " learned as much; a smaller slice or recipe.scaling.batch GlobalConstant makes more"
        )
    data = recipe.dataset_size
    if data is not None and now.batch > data * _LARGE_SHARE_OF_DATA:
        yield (
            f"the global batch of {now.batch} is {now.batch / data:.0%} of the {count(data, 'example')}, above"
            f" {float(_LARGE_SHARE_OF_DATA):.0%}, so that gradients hardly differ; a smaller slice or"
            " recipe.scaling.batch GlobalConstant avoids it"
        )
    yield from _short_warmup(recipe, now)
    if recipe.gradient_noise_scale is None:
        yield from _unmeasured(recipe, now)
    elif recipe.scaling.learning_rate is not LearningRateScaling.ADA_SCALE:
        yield from _measured(recipe, recipe.gradient_noise_scale, now)


def _short_warmup(recipe: Recipe, now: LargerBatch) -> Iterator[str]:
    needed = 2
    if now.multiplier > _LARGEST_WITHOUT_WARMUP:
        epochs = PUBLISHED_WARMUP_EPOCHS * ((recipe.dataset_size or 0) // now.batch)
        needed = max(_SHORTEST_WARMUP, ceil(min(epochs, Fraction(now.steps, _WARMUP_SHARE))))
    elif recipe.warmup_steps in (0, 1) or recipe.warmup_epochs == 0 or now.multiplier <= 1:
        return
    if now.warmup < needed:
        none = ", which is none: the first step has the whole rate" if now.warmup == 1 else ""
        field = "warmupSteps" if recipe.warmup_epochs is None else "warmupEpochs"
        yield (
            f"the learning rate grows {plain(now.multiplier)}-fold with a warm-up of {count(now.warmup, 'step')}{none};"
            f" raise recipe.{field} until it has {needed}, or limit the rate with scaling.maxLearningRate"
        )


def _unmeasured(recipe: Recipe, now: LargerBatch) -> Iterator[str]:
    """Yields a warning where no rule is known to hold and no noise scale says more."""
    wanted, rule = recipe.scaling.learning_rate, rule_of(recipe.optimizer.name)
    linear = wanted is LearningRateScaling.LINEAR or (
        wanted is LearningRateScaling.AUTO and rule is not None and rule.linear
    )
    factor = Fraction(now.batch, recipe.global_batch_size)
    times = f"the global batch of {now.batch} is {float(factor):.3g} times the tuned one"
    if wanted not in (LearningRateScaling.AUTO, LearningRateScaling.LINEAR) or is_published_linear(
        recipe, now.batch, now.warmup
    ):
        return
    # The rate of SGD stays at this limit beyond it, unless something else limits it further.
    limited = linear and factor > FURTHEST_LINEAR and now.multiplier == FURTHEST_LINEAR
    if limited or now.multiplier > FURTHEST_LINEAR:
        way = "take SquareRoot" if wanted is LearningRateScaling.LINEAR else "choose recipe.scaling.learningRate"
        yield (
            f"{times}, its learning rate {plain(now.multiplier)} times, and no rule is known to hold that far for every"
            f" task: quality may be lost; {_MEASURE} recipe.gradientNoiseScale, or {way}"
        )
    elif linear and now.batch > LARGEST_PUBLISHED_BATCH:
        yield (
            f"{times}; the linear rule is known to hold to batches of {LARGEST_PUBLISHED_BATCH} (Goyal et al. 2017);"
            f" {_MEASURE} recipe.gradientNoiseScale"
        )


def _measured(recipe: Recipe, noise: str, now: LargerBatch) -> Iterator[str]:
    tuned, rule = recipe.global_batch_size, rule_of(recipe.optimizer.name)
    more = examples_multiplier(Fraction(noise), tuned, now.batch)
    if more > _MORE_EXAMPLES:
        gets_them = recipe.scaling.steps is StepsScaling.SAME_LOSS or is_adaptive(recipe)
        way = ", an estimate" if gets_them else "; recipe.scaling.steps SameLoss trains on them"
        yield (
            f"with the gradient noise scale of {noise}, a global batch of {now.batch} needs about {float(more):.3g}"
            f" times the recipe's examples for the same loss{way}; a smaller slice needs fewer"
        )
    if rule is None:
        return
    best = noise_scale_multiplier(noise, rule, tuned, now.batch)
    if now.multiplier > best * _ABOVE_NOISE_SCALE:
        yield (
            f"the learning rate grows {plain(now.multiplier)}-fold, and the gradient noise scale of {noise} predicts"
            f" {plain(best)}-fold; leave recipe.scaling.learningRate to Auto, or set scaling.maxLearningRate"
        )
