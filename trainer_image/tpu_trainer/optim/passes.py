"""The gradients of a step's passes before its last one, where autograd would not add them up as exactly as promised.

Autograd adds a parameter's gradients in the parameter's type: in bfloat16 a sum over 64 passes is off by a percent. So
what 16-bit parameters have got is kept in float32, 4 bytes for each of their elements while the step's passes last.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tpu_trainer.optim.in_place import quickly


class EarlierPasses:
    """Holds the sums: `keep` between two passes, `take` after the last one, whose own gradients stay with the
    parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._narrow = [parameter for parameter in model.parameters() if parameter.dtype.itemsize < 4]
        self._sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def keep(self) -> None:
        for parameter in self._narrow:
            if parameter.grad is None:
                continue
            gradient, parameter.grad = parameter.grad.float(), None
            if parameter in self._sums:
                quickly(Tensor.add_, (self._sums[parameter], gradient), {})
            else:
                self._sums[parameter] = gradient

    def take(self) -> Mapping[nn.Parameter, Tensor]:
        """Returns the sums by parameter; the next step begins without any."""
        sums, self._sums = self._sums, {}
        return sums
