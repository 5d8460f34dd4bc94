"""Hyperparameters that remember past steps: betas, weight decay, the average of the weights. All opt-in.

    beta2'   = beta2 ^ k         keeps its half-life in examples; to first order Malladi et al. 2022 (square-root rule),
                                 and valid for every k; also rmsprop's alpha. Their rule for beta1 has no value from
                                 k = 10 on; it stays
    epsilon' = epsilon / sqrt(k) Malladi et al. 2022
    decay'   = k / m x decay     keeps AdamW's time scale 1/(rate x decay) in epochs (Wang and Aitchison 2024); m is the
                                 multiplier of the learning rate, after any cap
    ema'     = ema ^ k           Busbridge et al. 2023

k is the global batch divided by the recipe's.
"""

from decimal import Decimal
from fractions import Fraction

from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.domain.job.recipe.ledger import TEN_DIGITS, Ledger, decimal, plain
from tpu_training_operator.domain.job.recipe.optimizers import rule_of, takes

# Close to the smallest double.
_SMALLEST = Decimal("1e-300")
# The trainer's defaults, for a recipe that scales these without giving them: torch's, and those of Lion's authors.
_BETA2, _SHORT_BETA2, _EPSILON = "0.999", {"lion": "0.99", "rmsprop": "0.99"}, "1e-8"
_ADAMW_DECAY = "0.01"


def scaled_betas(recipe: Recipe, factor: Fraction, ledger: Ledger) -> dict[str, str]:
    """Returns beta1 and beta2 by name, as decimal strings, without those that the recipe leaves to the trainer."""
    optimizer, scaling = recipe.optimizer, recipe.scaling
    betas = {"beta1": optimizer.beta1, "beta2": optimizer.beta2}
    if scaling.betas and takes(optimizer, "beta2"):
        default = _SHORT_BETA2.get(optimizer.name.lower(), _BETA2)
        betas["beta2"] = _power("beta2", optimizer.beta2 or default, factor, ledger)
    return {name: value for name, value in betas.items() if value is not None}


def scaled_epsilon(recipe: Recipe, factor: Fraction, ledger: Ledger) -> str | None:
    optimizer, scaling = recipe.optimizer, recipe.scaling
    if not (scaling.betas and takes(optimizer, "beta2") and takes(optimizer, "epsilon")):
        return optimizer.epsilon
    tuned, root = optimizer.epsilon or _EPSILON, TEN_DIGITS.sqrt(decimal(factor))
    scaled = plain(TEN_DIGITS.divide(Decimal(tuned), root))
    ledger.note("epsilon", f"{tuned} / {plain(root)} = {scaled} (beside beta2)")
    return scaled


def tuned_weight_decay(recipe: Recipe) -> str | None:
    """Returns the recipe's weight decay, or the trainer's default; None where that is 0."""
    default = _ADAMW_DECAY if recipe.optimizer.name.lower() == "adamw" else None
    return recipe.optimizer.weight_decay or default


def scaled_weight_decay(recipe: Recipe, factor: Fraction, rate_multiplier: Decimal, ledger: Ledger) -> str | None:
    tuned, rule = tuned_weight_decay(recipe), rule_of(recipe.optimizer.name)
    if tuned is None or not recipe.scaling.weight_decay:
        return recipe.optimizer.weight_decay
    if rule is None or not rule.decoupled:
        name = recipe.optimizer.name
        why = f"no rule is known for {name}" if rule is None else f"the decay of {name} is part of its gradient (L2)"
        ledger.warn(f"recipe.scaling.weightDecay is not applied, because {why}; leave it out")
        return tuned
    multiplier = TEN_DIGITS.divide(decimal(factor), rate_multiplier)
    scaled = plain(TEN_DIGITS.multiply(Decimal(tuned), multiplier))
    ledger.note("weightDecay", f"{tuned} x {plain(multiplier)} = {scaled} (keeps the time scale in epochs)")
    return scaled


def scaled_ema(recipe: Recipe, factor: Fraction, ledger: Ledger) -> str | None:
    if recipe.ema_decay is None or not recipe.scaling.ema:
        return recipe.ema_decay
    return _power("emaDecay", recipe.ema_decay, factor, ledger)


def _power(name: str, tuned: str, factor: Fraction, ledger: Ledger) -> str:
    power = TEN_DIGITS.power(Decimal(tuned), decimal(factor))
    scaled = plain(power) if power >= _SMALLEST else "0"
    ledger.note(name, f"{tuned} ^ {plain(decimal(factor))} = {scaled} (keeps its memory in examples)")
    return scaled
