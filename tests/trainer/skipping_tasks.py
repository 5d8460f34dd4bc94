"""Tasks with an example that is broken, for recipe.onNotFinite: Skip on a device, where a step is made first and undone
afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.trainer import tasks
from tpu_trainer import Hyperparameters, Task

BROKEN = 17
"""The example that makes one step of every epoch infinite."""


def examples() -> TensorDataset:
    features, labels = tasks.examples().tensors
    broken = features.clone()
    broken[BROKEN] = math.inf
    return TensorDataset(broken, labels)


class Experts(nn.Module):
    """Each step uses one of two experts, whose state in a divided optimizer is created in different steps."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width, bias=False), nn.Tanh(), nn.Linear(width, 32, bias=False))
            for width in widths
        )
        self.head = nn.Linear(32, tasks.CLASSES)
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts[self.turn](torch.tanh(self.stem(x))))


def _experts(*widths: int) -> Task:
    calls = 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        model.turn = calls // 2 % 2
        return tasks.loss(model, batch)

    return Task(model=Experts(widths), train=examples(), loss=loss)


def unlike(hp: Hyperparameters) -> Task:
    return _experts(32, 48)


class Centred(nn.Module):
    """Subtracts a running mean, which it keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.centre
        self.centre.lerp_(x.detach().mean(0), 0.5)
        return centred


def centred(hp: Hyperparameters) -> Task:
    """Each of the experts has a buffer of its own, in one shape."""
    task = _experts(32, 32)
    for expert in task.model.experts:
        expert.append(Centred())
    return task


class Shifted(nn.Module):
    """Adds a constant, which it keeps in a buffer."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.register_buffer("by", torch.full((32,), by))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def shifted(hp: Hyperparameters) -> Task:
    """A step only reads the buffer of one of two equal parts."""
    task = _experts(32, 32)
    for number, expert in enumerate(task.model.experts):
        expert.append(Shifted(number + 0.5))
    return task


class Counting(Optimizer):
    """A rate that falls with the steps, which it counts in its group, as schedule-free optimizers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])


def _with(build: Callable[[Any], Optimizer]) -> Task:
    return replace(_experts(32, 32), model=tasks.Network(), loss=tasks.loss, optimizer=lambda given, hp: build(given))


def adagrad(hp: Hyperparameters) -> Task:
    return _with(lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.5))


def adafactor(hp: Hyperparameters) -> Task:
    return _with(lambda parameters: torch.optim.Adafactor(parameters, lr=0.1))


def counting(hp: Hyperparameters) -> Task:
    return _with(lambda parameters: Counting(parameters, lr=0.5))
