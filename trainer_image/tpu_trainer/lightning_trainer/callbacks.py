"""Lightning's own callbacks that a job refuses: they contradict the recipe, or no resume can continue them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tpu_trainer.contract.errors import UserCodeError
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


_NOT_CONTINUED = {
    "ModelPruning": (
        "a checkpoint has the pruned weights and not which they are, so a run that continues may train them again, and "
        "ends with fewer zeros than one that was never interrupted"
    ),
}


def refuse_callbacks(callbacks: Iterable[object]) -> None:
    """Raises UserCodeError if one of them is, or derives from, a callback that cannot be right here."""
    for text in _named(callbacks, _REFUSED):
        raise UserCodeError(text)


def not_continued(callbacks: Iterable[object]) -> Iterator[str]:
    """Says which callbacks keep too little in a checkpoint."""
    return _named(callbacks, _NOT_CONTINUED)


def _named(callbacks: Iterable[object], texts: Mapping[str, str]) -> Iterator[str]:
    for callback in callbacks:
        for owner in type(callback).__mro__:
            if owner.__name__ in texts and owner.__module__.partition(".")[0] in LIGHTNING:
                yield f"callback {type(callback).__name__}: {texts[owner.__name__]}"
