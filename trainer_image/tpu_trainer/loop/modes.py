"""Switches training and evaluation mode, module by module.

A task may put parts of its model into evaluation mode, and they stay there. A class may also override `train()`:
detection backbones freeze their norms in it, and adapters take their weights out of the model's again. Plain loops call
it through `model.train()`, and this module calls it at the same points.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tpu_trainer.contract.errors import user_code
from tpu_trainer.lightning import is_lightning

if TYPE_CHECKING:
    from torch import nn


def enter_training_mode(model: nn.Module) -> str | None:
    """Puts a model into training mode if all of it is in evaluation mode, as libraries load it; returns a remark.

    A part that the task itself has put into evaluation mode stays there, which is how batch norm is frozen.
    """
    if not model.training:
        with user_code("train() of the model"):
            model.train()
        return "the task's model is in evaluation mode: all of it is put into training mode"
    _train(model, {module for module in model.modules() if module.training})
    if resting := [name for name, module in model.named_modules() if not module.training]:
        more = f" and {len(resting) - 1} more" if resting[1:] else ""
        return f"stays in evaluation mode, as the task has set it: {resting[0]}{more}"
    return None


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode while the block runs; afterwards every module has its former mode."""
    training = {module for module in model.modules() if module.training}
    model.eval()
    try:
        yield
    finally:
        _train(model, training)


def _train(model: nn.Module, training: set[nn.Module]) -> None:
    """Puts these modules into training mode, and all others into evaluation mode."""
    for module in model.modules():
        module.training = module in training
    # Lightning's Trainer calls no overridden train(), and its modules train here as they do there.
    for module in () if is_lightning(model) else _outermost(model, training):
        with user_code(f"train() of {type(module).__name__}"):
            module.train()
    for module in model.modules():
        if module not in training:
            module.training = False


def _outermost(module: nn.Module, training: set[nn.Module]) -> Iterator[nn.Module]:
    """Finds the outermost modules that override `train()`: each calls it for the modules below."""
    of_class = str(type(module).train.__module__).partition(".")[0] != "torch"
    if module in training and (of_class or "train" in vars(module)):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, training)
