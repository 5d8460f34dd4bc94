"""scaling.learningRate AdaScale (Johnson et al. 2020): the trainer measures in every step how much of the larger batch
was worth having, raises the rate by that gain, and ends once the gains add up to the recipe's steps.

So steps, warm-up and milestones are the recipe's own. With k times its batch a gain is between 1 and k, and S steps of
the recipe become at least S / k and at most S.
"""

from fractions import Fraction
from math import ceil

from tpu_training_operator.api.recipe import LearningRateScaling, Recipe
from tpu_training_operator.api.trainer import BackendName, Trainer
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.domain.job.recipe.batch import ScaledBatch
from tpu_training_operator.domain.job.recipe.ledger import Ledger
from tpu_training_operator.domain.job.topology import SliceLayout

_FIELD = "spec.recipe.scaling.learningRate"
# The trainer adds up the gains in float32.
_MOST_STEPS = 2**24


def is_adaptive(recipe: Recipe) -> bool:
    return recipe.scaling.learning_rate is LearningRateScaling.ADA_SCALE


def fewest_steps(recipe: Recipe, batch: ScaledBatch, steps: int, ledger: Ledger) -> int:
    """Returns in how few steps a training of `steps` may end. Raises InvalidJob for what AdaScale is not made for."""
    if not is_adaptive(recipe):
        return steps
    if batch.total < recipe.global_batch_size:
        message = (
            f"AdaScale is for a larger batch than the recipe's {recipe.global_batch_size}, and this slice has"
            f" {batch.total}; use Linear or Auto"
        )
        raise InvalidJob([Problem(_FIELD, message)])
    if steps > _MOST_STEPS:
        raise InvalidJob([Problem(_FIELD, f"AdaScale counts at most {_MOST_STEPS} steps of the recipe, got {steps}")])
    fewest = ceil(steps * Fraction(recipe.global_batch_size, batch.total))
    if fewest < steps:
        ledger.note("trainSteps", f"AdaScale ends after {fewest} to {steps} steps, when the gains add up to {steps}")
    return fewest


def check_groups(recipe: Recipe, batch: ScaledBatch, trainer: Trainer, layout: SliceLayout) -> None:
    """Raises InvalidJob if AdaScale has no two gradients to compare: it needs a larger batch in several parts."""
    if not is_adaptive(recipe) or batch.total == recipe.global_batch_size or batch.accumulation > 1:
        return
    remedy, processes = "use backend XLA or Torch", 1
    if trainer.backend is BackendName.TORCH:
        processes = layout.hosts * (trainer.torch.processes_per_host if trainer.torch else 1)
        remedy = f"set trainer.torch.processesPerHost to {layout.replicas // layout.hosts}"
    if trainer.backend is not BackendName.XLA and processes < 2:
        message = f"AdaScale compares the gradients of several replicas, and here one process has them all; {remedy}"
        raise InvalidJob([Problem(_FIELD, message)])
