"""recipe.gradientClipNorm: the steps of plain PyTorch with clip_grad_norm_, and the norms that are reported."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer import plain, tasks
from tests.trainer.loop.test_trajectories import CLOSE
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task

LIMIT = 0.25
"""Some of the gradients are longer, and some are not."""

SGD = {"name": "sgd", "learningRate": "0.3", "momentum": "0.9", "weightDecay": "1e-4"}


def task(hp: Hyperparameters, rank: int) -> Task:
    return tasks.small(hp)


def clipped(replicas: int, made: Any = task, **changes: Any) -> Ran:
    recipe = {"trainSteps": 24, "warmupSteps": 5, "recipe": SGD, "gradientClipNorm": str(LIMIT)}
    return run(made, replicas, **{**recipe, **changes})


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_losses_equal_plain_pytorch_with_clip_grad_norm_and_the_norms_are_those_before(replicas: int) -> None:
    norms: list[float] = []

    def clip_and_step(model: nn.Module, rule: torch.optim.Optimizer) -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        rule.step()

    losses = plain.small("sgd", update=clip_and_step)
    assert min(norms) < LIMIT < max(norms)
    ran = clipped(replicas)
    assert ran.losses == pytest.approx(losses, abs=CLOSE)
    assert ran.norms == pytest.approx(norms, abs=CLOSE)
    ran.assert_replicas_equal()


def broken(step: int) -> Any:
    """The loss of `step`, counted from 1, is NaN."""

    def made(hp: Hyperparameters, rank: int) -> Task:
        calls = 0

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            nonlocal calls
            calls += 1
            return tasks.loss(model, batch) * (math.nan if calls == step else 1.0)

        return dataclasses.replace(tasks.small(hp), loss=loss)

    return made


@pytest.mark.parametrize(("policy", "ends"), [("Stop", ExitCode.NotFinite), ("Skip", ExitCode.Succeeded)])
def test_a_norm_that_is_not_finite_is_a_step_that_is_not_finite(policy: str, ends: ExitCode) -> None:
    ran = clipped(2, broken(12), onNotFinite=policy)
    assert ran.outcome.code is ends
    assert all(torch.isfinite(weight).all() for weight in ran.weights()) == (policy == "Skip")
