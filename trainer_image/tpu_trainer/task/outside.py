"""Parameters that a loss uses and the model does not have, such as the class centres of a metric-learning loss.

The optimizer is built from the model's parameters. Others would silently get a gradient that nothing uses: they keep
their initial values, which differ between replicas.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CellType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError

_SHOWN = 3
_BEGINS = "the loss uses"
_REMEDY = (
    "not in the task's model ({}). Make the module that has it part of the model, for example model.criterion = "
    "criterion, so that it moves to the model's device and the optimizer updates it: now it is not trained"
)
_MOST_SEEN = 1000
_MOVES = "ToCopy"
"""An operation that moves a tensor; its gradient goes back to the tensor's device."""


class OutsideParameters:
    """Searches the losses of the first two steps for such parameters. `tell`: called once, with a warning.

    A parameter counts in the first step. Any other tensor counts only if the second step's loss uses it again: a batch
    whose gradient a penalty needs is a new tensor in every step.
    """

    def __init__(self, model: nn.Module, device: torch.device, tell: Callable[[str], None]) -> None:
        self._model, self._device, self._tell = model, device, tell
        self._steps: list[int] = []
        self._seen: list[Tensor] = []

    def look(self, loss: Tensor, step: int) -> None:
        """Searches the loss of `step`, before its backward pass.

        Raises:
            UserCodeError: such a parameter is on another device than the model, where a backward pass is impossible.
        """
        if len(self._steps) > 1 or step in self._steps or loss.grad_fn is None:
            return
        self._steps.append(step)
        model = {id(parameter) for parameter in self._model.parameters()}
        leaves = [(leaf, user) for leaf, user in _leaves(loss) if id(leaf) not in model]
        before, self._seen = self._seen, []
        if len(self._steps) > 1:
            leaves = [(leaf, user) for leaf, user in leaves if any(leaf is seen for seen in before)]
        else:
            self._seen = [leaf for leaf, _ in leaves if not isinstance(leaf, nn.Parameter)]
            leaves = [(leaf, user) for leaf, user in leaves if isinstance(leaf, nn.Parameter)]
        if not leaves:
            return
        text = _describe(leaves)
        if any(leaf.device.type != self._device.type and user != _MOVES for leaf, user in leaves):
            raise UserCodeError(f"{text}, and on another device than {self._device.type}, where its gradient is")
        self._tell(
            f"{text}, unless the task has another optimizer for it: then no checkpoint has it, and its gradients are "
            "not averaged over the replicas"
        )

    @contextmanager
    def explain_errors(self, loss: Callable[..., Any]) -> Iterator[None]:
        """Adds an explanation to an error in the block if the loss cannot compute with parameters of another device."""
        try:
            yield
        except Exception as error:
            # A failure to explain must not replace the error.
            with suppress(Exception):
                self._explain(error, loss)
            raise

    def _explain(self, error: Exception, loss: Callable[..., Any]) -> None:
        model = {id(parameter) for parameter in self._model.parameters()}
        for name, parameter in _find_parameters(loss):
            elsewhere = parameter.requires_grad and parameter.device.type != self._device.type
            if elsewhere and id(parameter) not in model:
                text = f"{name} of shape {list(parameter.shape)}, on {parameter.device.type}"
                error.add_note(f"{_BEGINS} a parameter that is {_REMEDY.format(text)}")
                return


def _find_parameters(function: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Finds the parameters of modules that a function refers to: in its closure, its globals and what it wraps."""
    waiting, seen = [function], {id(function)}
    while waiting and len(seen) < _MOST_SEEN:
        value = waiting.pop()
        if isinstance(value, nn.Module):
            yield from ((f"{name} of {type(value).__name__}", part) for name, part in value.named_parameters())
            continue
        cells = getattr(value, "__closure__", None) or ()
        names = getattr(getattr(value, "__code__", None), "co_names", ())
        below = [cell.cell_contents for cell in cells if cell != CellType()]
        below += [value.__globals__[name] for name in names if name in value.__globals__]
        below += [getattr(value, name, None) for name in ("__self__", "__wrapped__", "func", "__func__")]
        below += list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type | ModuleType) else []
        for value in below:
            if id(value) not in seen and (callable(value) or isinstance(value, nn.Module)):
                seen.add(id(value))
                waiting.append(value)


def _leaves(loss: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Finds the tensors in which a gradient of the loss ends up, each with the name of an operation that uses it."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for below, _ in node.next_functions:
            if below is None or below in seen:
                continue
            seen.add(below)
            if hasattr(below, "variable"):
                yield below.variable, node.name().removesuffix("0").removesuffix("Backward")
            else:
                nodes.append(below)


def _describe(leaves: list[tuple[Tensor, str]]) -> str:
    shown = "; ".join(f"{_name(leaf)} of shape {list(leaf.shape)}, used by {user}" for leaf, user in leaves[:_SHOWN])
    more = f"; and {len(leaves) - _SHOWN} more" if leaves[_SHOWN:] else ""
    one = "a tensor that requires a gradient and is"
    what = one if len(leaves) == 1 else f"{len(leaves)} tensors that require a gradient and are"
    return f"{_BEGINS} {what} {_REMEDY.format(shown + more)}"


def _name(leaf: Tensor) -> str:
    """Returns the tensor's name and the class of the module that has it, if there is one."""
    # By type, because some objects lie about their `__class__`.
    modules = (value for value in gc.get_objects() if issubclass(type(value), nn.Module))
    for module in modules:
        for name, parameter in vars(module).get("_parameters", {}).items():
            if parameter is leaf:
                return f"{name} of {type(module).__name__}"
    return "a parameter" if isinstance(leaf, nn.Parameter) else "one"
