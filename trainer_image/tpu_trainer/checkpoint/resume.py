"""Computes where a run begins: at step 0, or where a checkpoint ends, on a slice of the same or another size.

Progress carries over in examples. With the same global batch the steps are the same too, and the run continues as if it
had never stopped. With another one the new recipe trains the remaining examples, after a short ramp of the rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpu_trainer.contract.findings import NumericalHealth
from tpu_trainer.data.order import Position
from tpu_trainer.optim.adascale import Gained, gained_in
from tpu_trainer.optim.schedule import Ramp, RecipeRate
from tpu_trainer.task.task import Hyperparameters


@dataclass(frozen=True)
class Leg:
    """One stretch of a run on one slice. `step`: steps of `global_batch` examples that counted as done at its start."""

    step: int
    global_batch: int
    replicas: int
    attempt: int


@dataclass(frozen=True)
class Start:
    """step: steps of this recipe that count as done. examples: seen by the job so far, at least step x global batch.

    legs: the stretches trained so far, the present one last. health: the checkpoint's. gained: with AdaScale, what the
    gains have come to; None without. ended: the checkpoint is of the
    training's end, so the hooks of the end do not run a second time.
    """

    step: int = 0
    examples: int = 0
    position: Position = field(default_factory=Position)
    ramp: Ramp | None = None
    legs: tuple[Leg, ...] = ()
    health: NumericalHealth = field(default_factory=NumericalHealth)
    ended: bool = False
    gained: Gained | None = None

    def examples_after(self, step: int, global_batch: int) -> int:
        return self.examples + (step - self.step) * global_batch


def document(
    start: Start, step: int, position: Position, learning_rate: float, hp: Hyperparameters, health: NumericalHealth
) -> dict[str, Any]:
    """Returns what a checkpoint after `step` steps keeps of a run, as JSON. `learning_rate`: the recipe's in the last
    step; in older checkpoints the first parameter group's."""
    return {
        "examples": start.examples_after(step, hp.global_batch_size),
        "globalBatch": hp.global_batch_size,
        "position": asdict(position),
        "learningRate": learning_rate,
        "ramp": None if start.ramp is None else asdict(start.ramp),
        "legs": [asdict(leg) for leg in start.legs],
        "clean": health.clean,
        "skipped": health.skipped,
        "skippedInARow": health.in_a_row,
    }


def fresh_start(hp: Hyperparameters, replicas: int, attempt: int) -> Start:
    gained = None if hp.ada_scale_batch_size is None else Gained(hp.ada_scale_batch_size)
    return Start(legs=(Leg(0, hp.global_batch_size, replicas, attempt),), gained=gained)


def continued_start(
    kept: Mapping[str, Any], hp: Hyperparameters, replicas: int, attempt: int, reduction: float = 1.0
) -> Start:
    """Returns the start of recipe `hp` from a checkpoint's document. `reduction`: of the rate, by schedule Plateau."""
    examples, batch = int(kept["examples"]), hp.global_batch_size
    step, gained = _continued_step(kept, examples, hp)
    earlier_legs = tuple(Leg(**leg) for leg in kept["legs"])
    ramp = None if kept["ramp"] is None or gained is not None else Ramp(**kept["ramp"])
    if kept["globalBatch"] != batch and gained is None:
        ramp = RecipeRate(hp, reduction).ramp_from(float(kept["learningRate"]), step)
    return Start(
        step=step,
        examples=examples,
        position=Position(**kept["position"]),
        ramp=ramp,
        legs=(*earlier_legs, Leg(step, batch, replicas, attempt)),
        health=NumericalHealth(
            bool(kept.get("clean", True)), int(kept.get("skipped", 0)), int(kept.get("skippedInARow", 0))
        ),
        gained=gained,
    )


def _continued_step(kept: Mapping[str, Any], examples: int, hp: Hyperparameters) -> tuple[int, Gained | None]:
    """Returns the steps of recipe `hp` that count as done, and what AdaScale's gains have come to, None without it.

    A run with AdaScale has seen more examples than its progress is worth to the recipe.
    """
    batch, recipe_batch, found = hp.global_batch_size, hp.ada_scale_batch_size, gained_in(kept)
    worth = examples if found is None else found[0].examples
    # Rounded down: a partial step counts as not done.
    step = min(worth // batch, hp.train_steps)
    if recipe_batch is None:
        return step, None
    if found is None:
        return step, Gained(recipe_batch, steps=float(worth // recipe_batch))
    gained, made = found
    # The steps that are left are at most the recipe's: a gain is at least 1.
    return made if kept["globalBatch"] == batch else step, gained.in_batches_of(recipe_batch)
