"""What the rules need to know about an optimizer, whether the trainer builds it or a task brings it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerRule:
    """linear: the best learning rate follows the batch linearly while noise dominates, not with its square root.
    decoupled: weight decay shrinks the weights beside the gradient's update; otherwise it is part of the gradient.
    source: of the rate's rule.
    """

    linear: bool
    decoupled: bool
    source: str


_MALLADI = "Malladi et al. 2022"
_YOU = "You et al. 2020"

RULES: Mapping[str, OptimizerRule] = {
    "sgd": OptimizerRule(linear=True, decoupled=False, source="Goyal et al. 2017"),
    "adam": OptimizerRule(linear=False, decoupled=False, source=_MALLADI),
    "adamw": OptimizerRule(linear=False, decoupled=True, source=_MALLADI),
    "rmsprop": OptimizerRule(linear=False, decoupled=False, source=_MALLADI),
    # Variants of Adam, which divide by the second moment, or a maximum, as it does.
    "adamw8bit": OptimizerRule(linear=False, decoupled=True, source=_MALLADI),
    "adamax": OptimizerRule(linear=False, decoupled=False, source=_MALLADI),
    "nadam": OptimizerRule(linear=False, decoupled=False, source=_MALLADI),
    "radam": OptimizerRule(linear=False, decoupled=False, source=_MALLADI),
    "adafactor": OptimizerRule(linear=False, decoupled=True, source=_MALLADI),
    # The sign of a gradient whose noise shrinks with the square root of the batch.
    "lion": OptimizerRule(linear=False, decoupled=True, source="Chen et al. 2023"),
    "lamb": OptimizerRule(linear=False, decoupled=True, source=_YOU),
    "lars": OptimizerRule(linear=False, decoupled=False, source=_YOU),
}


def rule_of(name: str) -> OptimizerRule | None:
    """Returns the rule of an optimizer, in any case of letters; None if no rule is known."""
    return RULES.get(name.lower())
