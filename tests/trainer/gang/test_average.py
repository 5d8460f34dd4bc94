"""The average of the weights: what it takes part in, and that the training's own weights always return."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tpu_trainer.gang.backends.group import ProcessGroup
from tpu_trainer.gang.backends.torch_dist import TorchDistributed
from tpu_trainer.optim.update import Average

HERE = TorchDistributed(ProcessGroup(0, 1), torch.device("cpu"))


def test_the_weights_return_after_an_evaluation_that_failed() -> None:
    model = nn.Linear(2, 1)
    average = Average(model, 0.5, HERE)
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        average.tensors["weight"].zero_()
    seen = []

    def failing() -> None:
        with average.in_model():
            seen.append(model.weight.abs().sum().item())
            raise ValueError("broken metric")

    with pytest.raises(ValueError, match="broken"):
        failing()
    assert seen == [0.0]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), own, strict=True))


def test_an_unfrozen_weight_joins_the_average_and_a_frozen_one_costs_nothing() -> None:
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    average = Average(model, 0.5, HERE)
    assert list(average.tensors) == ["bias"]
    model.weight.requires_grad_(True)
    average.update()
    assert set(average.tensors) == {"bias", "weight"}


def test_small_steps_of_low_precision_weights_are_not_lost() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 0.0)
    average = Average(model, 0.9999, HERE)
    nn.init.constant_(model.weight, 1.0)
    for _ in range(100):
        average.update()
    assert average.tensors["weight"].item() == pytest.approx(1 - 0.9999**100, rel=1e-3)
