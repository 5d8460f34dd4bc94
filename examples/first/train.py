"""Two spirals: a first job that needs nothing but the trainer's image (docs/desk.md#your-code-without-an-image)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tpu_trainer import Task

Batch = tuple[Tensor, Tensor]


def task(width: int = 32) -> Task:
    """`recipe.parameters.width` sets the width of the hidden layers; every fourth point is held out."""
    points, labels = spirals(2048)
    held_out = torch.arange(len(points)) % 4 == 0
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    return Task(
        model=model,
        train=TensorDataset(points[~held_out], labels[~held_out]),
        loss=loss,
        evaluation=TensorDataset(points[held_out], labels[held_out]),
        metrics=metrics,
    )


def spirals(count: int) -> tuple[Tensor, Tensor]:
    """Points of two spirals, each shifted a little, the same in every process."""
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(0)) * 0.2
    labels = torch.arange(count) // 2 % 2
    angle = torch.linspace(0.5, 1.5 * math.pi, count) + labels * math.pi
    radius = torch.linspace(0.3, 2.0, count)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1) + noise, labels


def loss(model: nn.Module, batch: Batch) -> Tensor:
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)


def metrics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    points, labels = batch
    return {"accuracy": model(points).argmax(dim=1) == labels}
