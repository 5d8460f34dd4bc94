"""Optimizers that torch lacks, or whose torch version makes the host wait for the device in every step.

All their state is in tensors on the parameter's device, step counts included, so that a step is part of one compiled
program, and one that is skipped (recipe.onNotFinite) can be undone. Their arithmetic is in float32 for 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tpu_trainer.contract.errors import UserCodeError


class _OnDevice(Optimizer):
    """Calls `_update` for every parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():  # type: ignore[no-untyped-call]
                loss = closure()
        for group in self.param_groups:
            for parameter in _trained(group["params"]):
                self._update(parameter, parameter.grad, group, self.state[parameter])
        return loss

    def _update(self, parameter: Tensor, gradient: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_OnDevice):
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2: with average m, gradient g, rate r and decay w,

    weights = weights - r (sign(beta1 m + (1 - beta1) g) + w weights),    m = beta2 m + (1 - beta2) g
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, gradient: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=_wide(parameter))
        average, (beta1, beta2) = state["exp_avg"], group["betas"]
        gradient = gradient.to(average.dtype)
        direction = average.lerp(gradient, 1 - beta1).sign()
        _decay(parameter, group)
        parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"])
        average.lerp_(gradient, 1 - beta2)


class Adafactor(_OnDevice):
    """Shazeer and Stern 2018 (arXiv:1804.04235), without momentum, as torch.optim.Adafactor computes it.

    With rate r, step t, relative rate a = max(1e-3, RMS(weights)) min(r, 1 / sqrt(t)) and decay 1 - t^-0.8 of the
    average of squared gradients, which is kept as row and column means: weights = (1 - r w) weights - a u / max(1,
    RMS(u)), where u is the gradient over the root of that average.
    """

    _RATE_DECAY, _AVERAGE_DECAY, _SMALLEST_SCALE, _CLIP = -0.5, -0.8, 1e-3, 1.0

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, gradient: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        gradient = gradient.to(_wide(parameter))
        if not state:
            # Not called "step": torch would leave a restored "step" on the host.
            state.update(self._fresh(gradient))
        state["count"] += 1
        weight = state["count"] ** self._AVERAGE_DECAY
        square = gradient.square()
        tiny = torch.finfo(parameter.dtype).eps
        if gradient.dim() > 1:
            rows, columns = state["row_var"], state["col_var"]
            rows.lerp_(square.mean(dim=-1, keepdim=True), weight)
            columns.lerp_(square.mean(dim=-2, keepdim=True), weight)
            estimate = rows @ columns / rows.mean(dim=-2, keepdim=True).clamp(min=tiny)
        else:
            estimate = state["variance"].lerp_(square, weight)
        update = gradient * estimate.clamp(min=tiny * tiny).rsqrt()
        rate = (state["count"] ** self._RATE_DECAY).clamp(max=group["lr"])
        scale = _rms(parameter.to(gradient.dtype)).clamp(min=self._SMALLEST_SCALE)
        step = update * (scale * rate / (_rms(update) / self._CLIP).clamp(min=1.0))
        _decay(parameter, group)
        parameter.sub_(step.to(parameter.dtype))

    @staticmethod
    def _fresh(gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield "count", gradient.new_zeros(())
        if gradient.dim() > 1:
            yield "row_var", torch.zeros_like(gradient[..., :1])
            yield "col_var", torch.zeros_like(gradient[..., :1, :])
        else:
            yield "variance", torch.zeros_like(gradient)


def _trained(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.is_complex():
            raise UserCodeError("Lion and Adafactor are not defined for complex parameters")
        yield parameter


def _decay(parameter: Tensor, group: dict[str, Any]) -> None:
    """Decays the weights, decoupled from the gradient, as in AdamW."""
    if group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()
