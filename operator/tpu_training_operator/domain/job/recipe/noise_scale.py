"""What the gradient noise scale predicts (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training").

Bn is the batch at which the noise of a gradient is as long as the gradient. With B examples a step, the best rate of
SGD and the loss that a step then saves are both their largest values divided by 1 + Bn/B (section 2.2). So the steps to
a loss are in proportion to 1 + Bn/B, and the examples to 1 + B/Bn (section 2.3).
"""

from fractions import Fraction


def best_multiplier(noise: Fraction, tuned: int, batch: int) -> Fraction:
    """Returns the best rate of SGD with `batch` examples a step, divided by the best one with `tuned`."""
    return (1 + noise / tuned) / (1 + noise / batch)


def examples_multiplier(noise: Fraction, tuned: int, batch: int) -> Fraction:
    """Returns how many times the examples the same loss takes with `batch` examples a step instead of `tuned`."""
    return (1 + batch / noise) / (1 + tuned / noise)
