"""What a larger batch may cost in quality, said before it costs chips. Each warning names the field that ends it."""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil

from tpu_training_operator.api.decimals import readable
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

# Up to about so many passes, a repeated example is worth having (Muennighoff et al. 2023: R* = 15). A
# training of fewer still learns from each of its examples when it ends, and a batch that wastes some costs quality.
_MANY_PASSES = 15
# The noise scale is smallest at the start of a training (McCandlish et al. 2018, section 3), so a larger batch wastes
# most of its examples there. That start has to be a small part of the training.
_FEW_UPDATES_OF_FEW_PASSES = 1000
# Momentum averages over some ten steps, and an added warm-up takes a twentieth: in fewer updates, a few steps each.
_FEW_UPDATES = 100
# Rules for the rate take it that noise shrinks as 1/B. Of the data without replacement, it shrinks by 1 - B/D besides.
_LARGE_SHARE_OF_DATA = Fraction(1, 4)
# A loss falls with about the power 0.095 of the examples (Kaplan et al. 2020, section 1.2), so that a tenth more are
# worth 0.02 of 2.2 nats. A training of many passes can spare those beyond 15, but never more than half.
_SPARED, _MOST_SPARED = Fraction(11, 10), Fraction(2)
_ABOVE_NOISE_SCALE = Decimal("1.5")
# Above this factor the linear rule is known to diverge without warm-up (Goyal et al. 2017, section 2.2).
_LARGEST_WITHOUT_WARMUP = 8
# Measured (docs/scaling.md): in a training that repeats no example, a rate that was tuned to the most that the model
# bears may not grow further, whatever the noise scale says.
_FURTHEST_OF_ONE_PASS = 2
_SHORTEST_WARMUP = 10
_WARMUP_SHARE = 20

_MEASURE = "set recipe.gradientNoiseScale (tpujob run --measure-noise measures it)"


@dataclass(frozen=True)
class LargerBatch:
    """The scaled numbers that are at risk. `multiplier`: of the learning rate, after any cap."""

    batch: int
    steps: int
    warmup: int
    multiplier: Decimal


def risks(recipe: Recipe, now: LargerBatch) -> Iterator[str]:
    """Yields a warning for each risk of a batch that is larger than the recipe's. AdaScale has none: it measures in
    every step what is guessed here."""
    if now.batch <= recipe.global_batch_size or is_adaptive(recipe):
        return
    yield from _short_warmup(recipe, now)
    if recipe.gradient_noise_scale is not None:
        yield from _predicted(recipe, recipe.gradient_noise_scale, now)
        return
    yield from _few_updates(recipe, now)
    yield from _large_share(recipe, now)
    yield from _far_from_tuned(recipe, now)


def _few_updates(recipe: Recipe, now: LargerBatch) -> Iterator[str]:
    passes = _passes(recipe, now)
    least = _FEW_UPDATES if passes >= _MANY_PASSES else _FEW_UPDATES_OF_FEW_PASSES
    if now.steps >= least:
        return
    in_passes = f" in {float(passes):.2g} passes over the data" if passes else ""
    way_out = "" if passes else f"set recipe.datasetSize if it makes {_MANY_PASSES} passes over its data, or "
    yield (
        f"the training makes {count(now.steps, 'update')}{in_passes}, fewer than {least}, and may end before it has"
        f" learned as much; {way_out}{_MEASURE} for a prediction, or take a smaller slice"
    )


def _passes(recipe: Recipe, now: LargerBatch) -> Fraction:
    """Returns how often the training sees each example; 0 if the size of the data is not known."""
    return Fraction(now.batch * now.steps, recipe.dataset_size) if recipe.dataset_size else Fraction(0)


def _large_share(recipe: Recipe, now: LargerBatch) -> Iterator[str]:
    data = recipe.dataset_size
    if data is not None and now.batch > data * _LARGE_SHARE_OF_DATA:
        yield (
            f"the global batch of {now.batch} is {now.batch / data:.0%} of the {count(data, 'example')}, above"
            f" {float(_LARGE_SHARE_OF_DATA):.0%}, so that gradients hardly differ; a smaller slice or"
            " recipe.scaling.batch GlobalConstant avoids it"
        )


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


def _far_from_tuned(recipe: Recipe, now: LargerBatch) -> Iterator[str]:
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
    # The rate of SGD stays at this limit beyond it, which costs little up to twice the factor.
    limited = linear and factor > 2 * FURTHEST_LINEAR and now.multiplier == FURTHEST_LINEAR
    if limited or now.multiplier > FURTHEST_LINEAR:
        way = "take SquareRoot" if wanted is LearningRateScaling.LINEAR else "choose recipe.scaling.learningRate"
        yield (
            f"{times}, its learning rate {plain(now.multiplier)} times, and no rule is known to hold that far for every"
            f" task: quality may be lost; {_MEASURE}, or {way}"
        )
    elif linear and now.batch > LARGEST_PUBLISHED_BATCH:
        yield (
            f"{times}; the linear rule is known to hold to batches of {LARGEST_PUBLISHED_BATCH} (Goyal et al. 2017);"
            f" {_MEASURE}"
        )


def _predicted(recipe: Recipe, noise: str, now: LargerBatch) -> Iterator[str]:
    tuned, rule = recipe.global_batch_size, rule_of(recipe.optimizer.name)
    more = examples_multiplier(Fraction(noise), tuned, now.batch)
    spared = min(_MOST_SPARED, max(_SPARED, _passes(recipe, now) / _MANY_PASSES))
    if more > spared and recipe.scaling.steps is not StepsScaling.SAME_LOSS:
        yield (
            f"with the gradient noise scale of {readable(noise)}, a global batch of {now.batch} needs about"
            f" {float(more):.3g} times the recipe's examples for the same loss; recipe.scaling.steps SameLoss trains on"
            " them, and a smaller slice needs fewer"
        )
    elif recipe.scaling.steps is StepsScaling.SAME_LOSS and now.multiplier > _FURTHEST_OF_ONE_PASS:
        yield from _tuned_to_the_most(recipe, now)
    if rule is None:
        return
    best = noise_scale_multiplier(noise, rule, tuned, now.batch)
    if now.multiplier > best * _ABOVE_NOISE_SCALE:
        yield (
            f"the learning rate grows {plain(now.multiplier)}-fold, and the gradient noise scale of {readable(noise)}"
            f" predicts {plain(best)}-fold; leave recipe.scaling.learningRate to Auto, or set scaling.maxLearningRate"
        )


def _tuned_to_the_most(recipe: Recipe, now: LargerBatch) -> Iterator[str]:
    passes = _passes(recipe, now)
    if passes <= 1:
        seen = f"sees {float(passes):.2g} of its data" if passes else "may see its data only once (recipe.datasetSize)"
        yield (
            f"the learning rate grows {plain(now.multiplier)}-fold in a training that {seen}: if the tuned rate is the"
            " most that the model bears, the loss stays higher or becomes NaN; try it on a rung of spec.ladder, or"
            " limit it with scaling.maxLearningRate"
        )
