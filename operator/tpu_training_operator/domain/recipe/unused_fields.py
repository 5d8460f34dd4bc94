"""What a recipe says and nothing will use, for `trainer.entrypoint`: a warning each.

Whether the task builds an optimizer of its own is known to the trainer only, which compares it with the recipe at its
start. What can be said before anything is paid for is said here.
"""

import difflib
from collections.abc import Iterator, Mapping
from decimal import Decimal

from tpu_training_operator.api.recipe import Optimizer, Recipe, ScheduleName
from tpu_training_operator.domain.recipe.scale import ScaledRecipe

_OF_ADAM = frozenset({"weight_decay", "beta1", "beta2", "epsilon"})

# The optimizers that the trainer builds (`tpu_trainer.optimizers`) and what each takes; a contract test compares them.
BUILT: Mapping[str, frozenset[str]] = {
    "adam": _OF_ADAM,
    "adamw": _OF_ADAM,
    "rmsprop": frozenset({"momentum", "weight_decay", "epsilon"}),
    "sgd": frozenset({"momentum", "weight_decay"}),
}
_SETTINGS = {
    "momentum": "momentum",
    "weight_decay": "weightDecay",
    "beta1": "beta1",
    "beta2": "beta2",
    "epsilon": "epsilon",
}
_CLOSE = 0.7


def unused(recipe: Recipe, scaled: ScaledRecipe) -> Iterator[str]:
    yield from _of_optimizer(recipe.optimizer)
    yield from _of_scaling(recipe)
    if recipe.schedule.factor is not None and recipe.schedule.name is ScheduleName.CONSTANT:
        yield "recipe.schedule.factor is not used: schedule Constant keeps the learning rate as it is"
    late = [milestone for milestone in scaled.milestones if milestone >= scaled.train_steps]
    if late:
        yield (
            f"milestones {', '.join(map(str, late))} are not reached: the training ends after "
            f"{scaled.train_steps} steps"
        )
    if scaled.ema_decay is not None and (1 - Decimal(scaled.ema_decay)) * scaled.train_steps < 1:
        yield (
            f"emaDecay {scaled.ema_decay} averages over more than the {scaled.train_steps} steps of the training: the"
            " average, which is what is evaluated, stays close to the initial weights"
        )


def _of_optimizer(optimizer: Optimizer) -> Iterator[str]:
    name = optimizer.name.lower()
    takes = BUILT.get(name)
    if takes is None:
        nearest = difflib.get_close_matches(name, BUILT, n=1, cutoff=_CLOSE)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        yield (
            f"the trainer builds {', '.join(sorted(BUILT))} and no {optimizer.name}{hint}: the task must bring an"
            " optimizer of its own, or the run fails at its start"
        )
        return
    for field, written in _SETTINGS.items():
        if getattr(optimizer, field) is not None and field not in takes:
            yield f"recipe.optimizer.{written} is not used: {name} takes none"


def _of_scaling(recipe: Recipe) -> Iterator[str]:
    scaling, takes = recipe.scaling, BUILT.get(recipe.optimizer.name.lower())
    if scaling.betas and takes is not None and "beta1" not in takes:
        yield f"recipe.scaling.betas is not used: {recipe.optimizer.name} takes none"
    if scaling.weight_decay and recipe.optimizer.weight_decay is None:
        yield "recipe.scaling.weightDecay is not used: recipe.optimizer gives no weightDecay to scale"
    if scaling.ema and recipe.ema_decay is None:
        yield "recipe.scaling.ema is not used: the recipe gives no emaDecay to scale"
