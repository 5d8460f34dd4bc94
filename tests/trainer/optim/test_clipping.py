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
from tests.trainer.reference import Reference, reference_run
from tests.trainer.whole_runs import Ran, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hooks, Hyperparameters, Task

LIMIT = 0.25
"""Some of the gradients are longer, and some are not."""

SGD = {"name": "sgd", "learningRate": "0.3", "momentum": "0.9", "weightDecay": "1e-4"}


def task(hp: Hyperparameters, rank: int) -> Task:
    return tasks.small(hp)


def clipped(replicas: int, made: Any = task, **changes: Any) -> Ran:
    recipe = {"trainSteps": 24, "warmupSteps": 5, "recipe": SGD, "gradientClipNorm": str(LIMIT)}
    return run(made, replicas, **{**recipe, **changes})


@pytest.fixture(scope="module")
def reference() -> Reference:
    made = reference_run("sgd", steps=24, warmup=5, batch=16, seed=3, limit=LIMIT)
    assert min(made.norms) < LIMIT < max(made.norms)
    return made


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_losses_equal_plain_pytorch_with_clip_grad_norm(reference: Reference, replicas: int) -> None:
    ran = clipped(replicas)
    assert ran.losses == pytest.approx(reference.losses, abs=CLOSE)
    assert ran.norms == pytest.approx(reference.norms, abs=CLOSE)
    ran.assert_replicas_equal()


def test_accumulated_passes_are_clipped_once_a_step(reference: Reference) -> None:
    ran = clipped(2, batch={"global": 16, "perReplica": 2, "accumulation": 4})
    assert ran.losses == pytest.approx(reference.losses, abs=CLOSE)


class Scaling(Hooks):
    """Makes the first layers' gradients longer, as by weights for layers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in (self._model.first.weight, self._model.second.bias):
            parameter.grad.mul_(30.0)


@pytest.mark.parametrize("scheduled", [False, True], ids=["", "with a scheduler"])
def test_gradients_that_a_hook_has_changed_are_clipped_by_their_new_length(scheduled: bool) -> None:
    def scaled(hp: Hyperparameters, rank: int) -> Task:
        made = tasks.small(hp)
        steady = (lambda optimizer, hp: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)) if scheduled else None
        build = lambda given, hp: torch.optim.SGD(given, lr=hp.learning_rate, momentum=0.9)  # noqa: E731
        return dataclasses.replace(made, hooks=Scaling(made.model), scheduler=steady, optimizer=build)

    ran = clipped(2, scaled, warmupSteps=0)
    torch.manual_seed(plain.SEED)
    model = tasks.Network()
    rule = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for batch in plain.batches(tasks.examples(), 24):
        rule.zero_grad()
        value = tasks.loss(model, batch)
        value.backward()
        Scaling(model).before_update(rule)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        rule.step()
        losses.append(value.item())
    assert ran.losses == pytest.approx(losses, abs=CLOSE)


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
