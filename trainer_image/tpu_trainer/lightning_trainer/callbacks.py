"""Lightning's own callbacks that a job refuses: they contradict the recipe, or no resume can continue them."""

from __future__ import annotations

from collections.abc import Iterable

from tpu_trainer.errors import UserCodeError
from tpu_trainer.lightning.session import LIGHTNING

_REFUSED = {
    "LearningRateFinder": (
        "it trains with other learning rates than recipe.learningRate. Run it by itself and write the rate that it "
        "finds into the recipe"
    ),
    "BatchSizeFinder": "the batch follows from recipe.globalBatchSize and the slice. Leave it out",
    "GradientAccumulationScheduler": (
        "how many passes make a step follows from recipe.globalBatchSize and the slice. Leave it out"
    ),
    "StochasticWeightAveraging": (
        "a run that continues inside an epoch loses what it has averaged. Use WeightAveraging of the same package, "
        "whose should_update says from which step or epoch on it averages, and the recipe's schedule"
    ),
}


def refuse_callbacks(callbacks: Iterable[object]) -> None:
    """Raises UserCodeError if one of them is, or derives from, a callback that cannot be right here."""
    for callback in callbacks:
        for owner in type(callback).__mro__:
            if owner.__name__ in _REFUSED and owner.__module__.partition(".")[0] in LIGHTNING:
                raise UserCodeError(f"callback {type(callback).__name__}: {_REFUSED[owner.__name__]}")
