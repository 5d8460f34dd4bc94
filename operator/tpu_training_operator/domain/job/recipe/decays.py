"""Hyperparameters that remember past steps: betas, weight decay, the average of the weights. All opt-in.

    beta'  = beta ^ k          keeps the half-life in examples; to first order the SDE rule of Malladi et al. 2022, and
                               valid for every k (Marek et al. 2025)
    decay' = k / m x decay     keeps AdamW's time scale 1/(rate x decay) in epochs (Wang and Aitchison 2024); m is the
                               multiplier of the learning rate, after any cap
    ema'   = ema ^ k           Busbridge et al. 2023

k is the global batch divided by the recipe's.
"""

from decimal import Decimal
from fractions import Fraction

from tpu_training_operator.api.recipe import Recipe
from tpu_training_operator.domain.job.recipe.ledger import TEN_DIGITS, Ledger, decimal, plain

# Close to the smallest double.
_SMALLEST = Decimal("1e-300")
# The trainer's defaults, for a recipe that scales betas without giving them: torch's, and those of Lion's authors.
_DEFAULT_BETAS = {"beta1": "0.9", "beta2": "0.999"}
_LION_BETAS = {"beta1": "0.9", "beta2": "0.99"}


def scaled_betas(recipe: Recipe, factor: Fraction, ledger: Ledger) -> dict[str, str]:
    """Returns beta1 and beta2 by name, as decimal strings, without those that the recipe leaves to the trainer."""
    betas = {"beta1": recipe.optimizer.beta1, "beta2": recipe.optimizer.beta2}
    if not recipe.scaling.betas:
        return {name: value for name, value in betas.items() if value is not None}
    default = _LION_BETAS if recipe.optimizer.name.lower() == "lion" else _DEFAULT_BETAS
    tuned = {name: value or default[name] for name, value in betas.items()}
    return {name: _power(name, value, factor, ledger) for name, value in tuned.items()}


def scaled_weight_decay(recipe: Recipe, factor: Fraction, rate_multiplier: Decimal, ledger: Ledger) -> str | None:
    tuned = recipe.optimizer.weight_decay
    if tuned is None or not recipe.scaling.weight_decay:
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
