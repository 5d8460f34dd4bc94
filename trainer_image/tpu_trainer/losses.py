"""What a task's `loss` may return, and how the parts of a step's loss become one. Used by `loop` and `bucket`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpu_trainer.errors import UserCodeError


@dataclass(frozen=True)
class Loss:
    """A replica's part of a step's loss, which is the sum of all totals over the sum of all weights; no dimensions.

    weight None: `total` is a mean over the replica's examples, and all replicas weigh the same.
    """

    total: Tensor
    weight: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.total] if self.weight is None else [self.total, self.weight]

    @property
    def mean(self) -> Tensor:
        return self.total if self.weight is None else self.total / self.weight

    def plus(self, later: Loss) -> Loss:
        """With that of the step's next pass."""
        if self.weight is None or later.weight is None:
            if self.weight is not later.weight:
                raise UserCodeError("the task's loss must return a mean in every pass, or (sum, weight) in every pass")
            return Loss(self.total + later.total)
        return Loss(self.total + later.total, self.weight + later.weight)

    def detached(self) -> Loss:
        return Loss(self.total.detach(), None if self.weight is None else self.weight.detach())


def loss_of(returned: Any, passes: int) -> Loss:
    """From what the task's `loss` returned for one of a step's `passes`.

    Raises:
        UserCodeError: it is neither a mean nor (sum, weight).
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        total, weight = returned
        if _is_number(total) and _is_number(weight):
            return Loss(wide(total), wide(weight))
        found = f"({_described(total)}, {_described(weight)})"
    elif _is_number(returned):
        mean = wide(returned)
        return Loss(mean / passes if passes > 1 else mean)
    else:
        found = _described(returned)
    raise UserCodeError(
        "the task's loss must return the mean over the batch, a tensor of shape [], or (sum, weight), two of them; got "
        f"{found}"
    )


def wide(value: Tensor) -> Tensor:
    """As float32 or float64, in which the passes of a step add up: True + True is True, and float16 ends at 65504."""
    return value if value.dtype == torch.float64 or value.is_complex() else value.float()


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
