"""The recipe scaled from the slice it was tuned on to the slice it runs on.

With N replicas on the tuned slice, N' on this one, and k = N'/N where every replica keeps its batch:

    batch       B' = k B                 or B, by accumulation
    steps       S' = ceil(S B / B')      the same examples; from epochs, E floor(D / B') for D examples;
                                         with scaling.steps SameLoss as many more as the same loss takes
    warm-up     W' = ceil(W B / B')      likewise milestones and evaluations
    rate        k eta or sqrt(k) eta, or what a measured noise scale predicts

Source for batch and steps: Google's "Training on TPU Pods" (1024 on v2-8 becomes 4096 on v2-32, 1000 steps become 250).
The modules name the sources of the other rules. Checkpoint and log intervals are not scaled, because they bound lost
work in time, not in examples.
"""

from dataclasses import dataclass
from fractions import Fraction

from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.domain.job.recipe import steps as step_rules
from tpu_training_operator.domain.job.recipe.adascale import fewest_steps, is_adaptive
from tpu_training_operator.domain.job.recipe.batch import ScaledBatch, scaled_batch, spread
from tpu_training_operator.domain.job.recipe.decays import scaled_betas, scaled_ema, scaled_epsilon, scaled_weight_decay
from tpu_training_operator.domain.job.recipe.learning_rate import scaled_learning_rate
from tpu_training_operator.domain.job.recipe.ledger import Ledger, Note, plain
from tpu_training_operator.domain.job.recipe.risks import LargerBatch, risks


@dataclass(frozen=True)
class ScaledRecipe:
    """What the job trains with. Numbers that are not whole are decimal strings, None if the recipe gives none.

    Steps, warm-up and milestones are counted in batches of `step_batch` examples: of the global batch, with AdaScale of
    the recipe's. `fewest_steps` differs from `train_steps` with AdaScale only. `factor` is the global batch divided by
    the recipe's. `notes` give the rule behind each number, `warnings` name what deserves a second look.
    """

    batch: ScaledBatch
    step_batch: int
    train_steps: int
    fewest_steps: int
    warmup_steps: int
    milestones: tuple[int, ...]
    evaluate_every_steps: int | None
    stop_patience: int | None
    plateau_patience: int | None
    learning_rate: str
    weight_decay: str | None
    betas: dict[str, str]
    epsilon: str | None
    ema_decay: str | None
    factor: Fraction
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]

    @property
    def steps(self) -> str:
        """The steps of the training, in words."""
        return (
            f"{self.fewest_steps} to {self.train_steps}"
            if self.fewest_steps < self.train_steps
            else str(self.train_steps)
        )


def scale(recipe: Recipe, tuned_replicas: int, replicas: int, spread_over: int | None = None) -> ScaledRecipe:
    """Returns the recipe scaled from `tuned_replicas` to `replicas`. Raises InvalidJob if the batch does not divide.

    `spread_over`: how many replicas train with these numbers; by default `replicas`.
    """
    ledger = Ledger()
    batch = scaled_batch(recipe, tuned_replicas, replicas, ledger)
    if spread_over not in (None, replicas):
        batch = spread(batch, spread_over, ledger)
    factor = Fraction(batch.total, recipe.global_batch_size)
    step_rules.check_data(recipe, batch.total)
    counted = recipe.global_batch_size if is_adaptive(recipe) else batch.total
    steps = step_rules.train_steps(recipe, counted, ledger)
    fewest = fewest_steps(recipe, batch, steps, ledger)
    warmup = step_rules.warmup_steps(recipe, counted, steps, ledger)
    rate = scaled_learning_rate(recipe, batch.total, warmup, ledger)
    for risk in risks(recipe, LargerBatch(batch.total, steps, warmup, rate.multiplier)):
        ledger.warn(risk)
    every, stretched = step_rules.evaluate_every(recipe, batch.total, ledger)
    stop = None if recipe.stop_early is None else recipe.stop_early.patience
    return ScaledRecipe(
        batch=batch,
        step_batch=counted,
        train_steps=steps,
        fewest_steps=fewest,
        warmup_steps=warmup,
        milestones=tuple(step_rules.milestones(recipe, counted, ledger)),
        evaluate_every_steps=every,
        stop_patience=step_rules.scaled_patience("stopEarly", stop, stretched, ledger),
        plateau_patience=step_rules.scaled_patience("schedule", recipe.schedule.patience, stretched, ledger),
        learning_rate=plain(rate.value),
        weight_decay=scaled_weight_decay(recipe, factor, rate.multiplier, ledger),
        betas=scaled_betas(recipe, factor, ledger),
        epsilon=scaled_epsilon(recipe, factor, ledger),
        ema_decay=scaled_ema(recipe, factor, ledger),
        factor=factor,
        notes=tuple(ledger.notes),
        warnings=tuple(ledger.warnings),
    )
