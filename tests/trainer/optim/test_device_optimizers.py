"""Lion and Adafactor follow their formulas, and keep what they need beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.optim.device_optimizers import Adafactor, Lion

SHAPES = [(), (7,), (3, 5), (4, 3, 2, 2), (1, 6)]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def trained(make: Make, steps: int = 40, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The weights of every shape after the steps, whose rates and gradients change, and the gradients of each step."""
    generator = torch.Generator().manual_seed(5)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer, given = make(weights), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step % 7)
        given.append([10.0 ** (step % 5 - 2) * torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES])
        for weight, gradient in zip(weights, given[-1], strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach() for weight in weights], given


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lion_follows_its_authors_algorithm(decay: float) -> None:
    found, gradients = trained(lambda weights: Lion(weights, betas=(0.8, 0.95), weight_decay=decay))
    start, _ = trained(lambda weights: torch.optim.SGD(weights), steps=0)
    for place, weight in enumerate(start):
        average = torch.zeros_like(weight)
        for step, given in enumerate(gradients):
            rate, gradient = 0.1 / (1 + step % 7), given[place]
            direction = torch.sign(0.8 * average + 0.2 * gradient)
            weight = weight - rate * (direction + decay * weight)
            average = 0.95 * average + 0.05 * gradient
        torch.testing.assert_close(found[place], weight)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adafactor_equals_torchs(decay: float) -> None:
    ours, _ = trained(lambda weights: Adafactor(weights, weight_decay=decay))
    theirs, _ = trained(lambda weights: torch.optim.Adafactor(weights, lr=0.1, weight_decay=decay))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("make", [Lion, Adafactor])
def test_16_bit_weights_have_a_state_of_32_bits(make: Any) -> None:
    weights = [nn.Parameter(torch.randn(4, 3).bfloat16())]
    optimizer = make(weights, lr=0.1)
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert weights[0].dtype is torch.bfloat16
    assert {tensor.dtype for state in optimizer.state.values() for tensor in state.values()} == {torch.float32}


@pytest.mark.parametrize("make", [Lion, Adafactor])
def test_complex_weights_are_refused(make: Any) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(UserCodeError, match="complex"):
        make([weight]).step()
