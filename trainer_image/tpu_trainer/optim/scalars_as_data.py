"""Keeps the numbers of an optimizer's step out of the compiled program.

torch_xla passes Python numbers to the device as data, with two exceptions: 0 and 1 are constants of the program, and
equal numbers are one input of it. So a rate, a momentum or a bias correction that reaches or leaves such a value makes
another program in the middle of a run, which takes minutes on a slice: OneCycleLR does so where its phases meet, Adam
with beta2 0.999 near step 16,600, where its bias correction rounds to 1.

Here such a number is moved by one unit in the last place, less than the rounding error of the operation that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpu_trainer.optim.in_place import call_in_place

_ARITHMETIC = {"add", "sub", "mul", "div", "truediv", "lerp", "addcmul", "addcdiv"}
_OPERATIONS = {*_ARITHMETIC, *(f"{kind}{name}" for kind in "ir" for name in _ARITHMETIC)}
"""Operations in which a unit in the last place does not matter; not comparisons, exponents and fills."""

_CONSTANTS = (0.0, 1.0)
_TINY = 1e-30
"""Smaller numbers are moved upwards, since there is little room below them."""

Place = tuple[str, int | str]
"""An operation, and the index or name of its argument."""


class ScalarsAsData(TorchFunctionMode):
    """A context for the steps of one optimizer, which keeps its float32 numbers distinct and data in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[Place, _Numbers] = {}
        self._taken: set[float] = set()
        self._names: dict[Callable[..., Any], str] = {}

    def __enter__(self) -> Any:
        self._taken.clear()
        for numbers in self._places.values():
            numbers.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = getattr(func, "__name__", "").strip("_")
        if name not in _OPERATIONS:
            return func(*args, **named)
        if isinstance(alpha := named.get("alpha"), Tensor):
            # torch would read the number, and wait for the device.
            args, named = (args[0], args[1] * alpha), {}
        if _computes_in_float32(args):
            args = tuple([self._replace(name, at, value) for at, value in enumerate(args)])
            named = {at: self._replace(name, at, value) for at, value in named.items()}
        return call_in_place(func, args, named)

    def _replace(self, name: str, at: int | str, value: Any) -> Any:
        if type(value) is not float:
            return value
        numbers = self._places.get((name, at))
        if numbers is None:
            numbers = self._places[name, at] = _Numbers()
        return numbers.replace(value, self._taken)


class _Numbers:
    """The numbers at one place. Numbers that are equal in the first step count as one until they differ.

    A number that is 0 or 1 from the start stays a constant as long as it keeps that value: multiplying by almost 1
    would change frozen weights in the long run.
    """

    def __init__(self) -> None:
        self._slots: list[int] = []
        """For each call within the step, the number that it uses."""
        self._varies: list[bool] = []
        self._now: dict[int, tuple[float, float]] = {}
        """For each number, the value that the optimizer passed in this step, and its replacement."""
        self._call = 0

    def begin(self) -> None:
        self._now.clear()
        self._call = 0

    def replace(self, value: float, taken: set[float]) -> float:
        """Returns the value's replacement and adds it to `taken`, the replacements of the step's other numbers."""
        slot = self._slot(value)
        if slot not in self._now:
            self._now[slot] = value, self._distinct(slot, value, taken)
        return self._now[slot][1]

    def _slot(self, value: float) -> int:
        call, self._call = self._call, self._call + 1
        if call < len(self._slots):
            slot = self._slots[call]
            if slot not in self._now or self._now[slot][0] == value:
                return slot
        same = [slot for slot, (original, _) in self._now.items() if original == value]
        slot = same[0] if same else len(self._varies)
        if not same:
            self._varies.append(False)
        self._slots[call : call + 1] = [slot]
        return slot

    def _distinct(self, slot: int, value: float, taken: set[float]) -> float:
        number = np.float32(value)
        if float(number) not in _CONSTANTS:
            self._varies[slot] = True
        elif not self._varies[slot]:
            return value
        towards = np.float32(1 if abs(value) < _TINY else 0)
        while float(number) in taken or float(number) in _CONSTANTS:
            number = np.nextafter(number, towards)
        taken.add(float(number))
        # The original if it need not move, since a wider type may use it.
        return value if number == np.float32(value) else float(number)


def _computes_in_float32(args: tuple[Any, ...]) -> bool:
    for value in args:
        if isinstance(value, Tensor):
            return value.dtype == torch.float32
    return False
