"""Parameters that a loss uses and the model does not have, such as the class centres of a metric-learning loss.

The optimizer is built from the model's parameters. Others would get a gradient that nothing uses, in silence: they keep
the values of the first step, and each replica has its own.
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
    "criterion, so that it moves to the model's device and the optimizer gets it: as it is, it is not trained"
)
_MOST_SEEN = 1000
_MOVES = "ToCopy"
"""An operation whose gradient goes back to the device of what it has moved."""


class OutsideParameters:
    """Looks at the losses of the first two steps. `tell`: is told once.

    A parameter counts at once. Any other tensor counts only if the second step's loss uses it again: a batch whose
    gradient a penalty needs is a new tensor in every step.
    """

    def __init__(self, model: nn.Module, device: torch.device, tell: Callable[[str], None]) -> None:
        self._model, self._device, self._tell = model, device, tell
        self._steps: list[int] = []
        self._seen: list[Tensor] = []

    def look(self, loss: Tensor, step: int) -> None:
        """Looks at the loss of `step`, before its backward pass.

        Raises:
            UserCodeError: such a parameter is on another device than the model, so that no backward pass can be made.
        """
        if len(self._steps) > 1 or step in self._steps or loss.grad_fn is None:
            return
        self._steps.append(step)
        own = {id(parameter) for parameter in self._model.parameters()}
        found = [(leaf, user) for leaf, user in _leaves(loss) if id(leaf) not in own]
        before, self._seen = self._seen, []
        if len(self._steps) > 1:
            found = [(leaf, user) for leaf, user in found if any(leaf is one for one in before)]
        else:
            self._seen = [leaf for leaf, _ in found if not isinstance(leaf, nn.Parameter)]
            found = [(leaf, user) for leaf, user in found if isinstance(leaf, nn.Parameter)]
        if not found:
            return
        text = _described(found)
        if any(leaf.device.type != self._device.type and user != _MOVES for leaf, user in found):
            raise UserCodeError(f"{text}, and on another device than {self._device.type}, where its gradient is")
        self._tell(
            f"{text}, unless the task has an optimizer of its own for them: no checkpoint has them then, and their "
            "gradients are not averaged over the replicas"
        )

    @contextmanager
    def explained(self, loss: Callable[..., Any]) -> Iterator[None]:
        """Explains an error of the loss in the block, which cannot compute with parameters of another device."""
        try:
            yield
        except Exception as error:
            # What is only a hint must not take the error's place.
            with suppress(Exception):
                self._explain(error, loss)
            raise

    def _explain(self, error: Exception, loss: Callable[..., Any]) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        for name, parameter in _reached(loss):
            away = parameter.requires_grad and parameter.device.type != self._device.type
            if away and id(parameter) not in own:
                found = f"{name} of shape {list(parameter.shape)}, on {parameter.device.type}"
                error.add_note(f"{_BEGINS} a parameter that is {_REMEDY.format(found)}")
                return


def _reached(function: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Finds the parameters of modules that a function refers to: in its closure, its globals and what it wraps."""
    waiting, seen = [function], {id(function)}
    while waiting and len(seen) < _MOST_SEEN:
        value = waiting.pop()
        if isinstance(value, nn.Module):
            yield from ((f"{name} of {type(value).__name__}", one) for name, one in value.named_parameters())
            continue
        cells = getattr(value, "__closure__", None) or ()
        names = getattr(getattr(value, "__code__", None), "co_names", ())
        below = [cell.cell_contents for cell in cells if cell != CellType()]
        below += [value.__globals__[name] for name in names if name in value.__globals__]
        below += [getattr(value, name, None) for name in ("__self__", "__wrapped__", "func", "__func__")]
        below += list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type | ModuleType) else []
        for one in below:
            if id(one) not in seen and (callable(one) or isinstance(one, nn.Module)):
                seen.add(id(one))
                waiting.append(one)


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


def _described(found: list[tuple[Tensor, str]]) -> str:
    shown = "; ".join(f"{_name(leaf)} of shape {list(leaf.shape)}, used by {user}" for leaf, user in found[:_SHOWN])
    more = f"; and {len(found) - _SHOWN} more" if found[_SHOWN:] else ""
    what = "a tensor that requires a gradient and is" if len(found) == 1 else f"{len(found)} tensors that require a"
    what = what if len(found) == 1 else f"{what} gradient and are"
    return f"{_BEGINS} {what} {_REMEDY.format(shown + more)}"


def _name(leaf: Tensor) -> str:
    """Returns its name and the class of the module that has it, if there is one."""
    # By type: an object in the way may answer for its class in a way of its own.
    modules = (held for held in gc.get_objects() if issubclass(type(held), nn.Module))
    for module in modules:
        for name, parameter in vars(module).get("_parameters", {}).items():
            if parameter is leaf:
                return f"{name} of {type(module).__name__}"
    return "a parameter" if isinstance(leaf, nn.Parameter) else "one"
