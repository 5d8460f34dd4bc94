"""Tasks for torch.compile: what makes it compile again, and what it does not take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer import tasks
from tpu_trainer import Hyperparameters, Task, log


def reshaping(hp: Hyperparameters) -> Task:
    """From the fifth step on, examples have two numbers less. A step has eight passes."""
    made = 0

    def collate(examples: list[Any]) -> tuple[Tensor, Tensor]:
        nonlocal made
        made += 1
        features, labels = (torch.stack(each) for each in zip(*examples, strict=True))
        return (features if made <= 8 * 4 else features[:, :6]), labels

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = batch
        return nn.functional.cross_entropy(model(nn.functional.pad(features, (0, 8 - features.shape[1]))), labels)

    return Task(model=tasks.Network(), train=tasks.examples(), loss=loss, collate=collate)


def logging(hp: Hyperparameters) -> Task:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = batch
        hidden = model(features)
        log("twice", 2 * hidden[:, 0].mean())
        return nn.functional.cross_entropy(hidden, labels)

    return Task(model=tasks.Network(), train=tasks.examples(), loss=loss)
