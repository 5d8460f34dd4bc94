"""What the rules need to know about an optimizer, whether the trainer builds it or a task brings it."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpu_contract.protocol import OPTIMIZERS
from tpu_training_operator.api.recipe import Optimizer


@dataclass(frozen=True)
class OptimizerRule:
    """linear: the best learning rate follows the batch linearly while noise dominates, not with its square root.
    decoupled: weight decay shrinks the weights beside the gradient's update; otherwise it is part of the gradient.
    source: of the rate's rule.
    keeps_warmup_steps: its warm-up keeps its steps, so that the examples in it grow with the batch.
    """

    linear: bool
    decoupled: bool
    source: str
    keeps_warmup_steps: bool = False


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
    "lamb": OptimizerRule(linear=False, decoupled=True, source=_YOU, keeps_warmup_steps=True),
    "lars": OptimizerRule(linear=False, decoupled=False, source=_YOU, keeps_warmup_steps=True),
}


def takes(optimizer: Optimizer, setting: str) -> bool:
    """Returns whether an optimizer has a setting: one of a task's own, if the recipe gives it."""
    known = OPTIMIZERS.get(optimizer.name.lower())
    return getattr(optimizer, setting) is not None if known is None else setting in known


def rule_of(name: str) -> OptimizerRule | None:
    """Returns the rule of an optimizer, in any case of letters; None if no rule is known."""
    return RULES.get(name.lower())
