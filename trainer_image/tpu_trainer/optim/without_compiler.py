"""Spares runs that compile nothing with torch.compile the import of its compiler, which takes half as long as torch's.

An optimizer's methods import it when they are first called, to tell it to leave them alone (torch/_compile.py). So does
every step of torch's own optimizers, to end a program there (torch/optim/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType

import torch
from torch.optim import Optimizer

_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_IMPORTS = "_use_grad"
"""The name of the wrapper around a step that imports the compiler; besides, it turns gradients off."""


def spare_methods() -> None:
    """Has the methods of every optimizer run as they are, for the whole process."""
    for name in _METHODS:
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if isinstance(method, FunctionType):
            vars(method).setdefault("__dynamo_disable", method)


def spare_step(optimizer: Optimizer) -> None:
    """Replaces the step of one of torch's optimizers with the same one without the wrapper. Leaves a step alone that
    somebody has wrapped or replaced."""
    # A task may have put another step in its place, as a scheduler does that a LightningModule has built. What a
    # library calls an optimizer may be any object.
    if not isinstance(optimizer, Optimizer) or "step" in vars(optimizer):
        return
    wrapper = next((layer for layer in _layers(optimizer) if layer.__code__.co_name == _IMPORTS), None)
    if wrapper is None or optimizer.defaults.get("differentiable"):
        return
    step = Optimizer.profile_hook_step(torch.no_grad()(vars(wrapper)["__wrapped__"]))
    # Bound, because torch's schedulers wrap it as a method.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _layers(optimizer: Optimizer) -> Iterator[FunctionType]:
    """Yields torch's wrappers around the step, from the outermost, as long as no other is around them."""
    torchs, layer = Optimizer.profile_hook_step.__code__.co_filename, getattr(type(optimizer), "step", None)
    while isinstance(layer, FunctionType) and layer.__code__.co_filename == torchs:
        yield layer
        layer = vars(layer).get("__wrapped__")
