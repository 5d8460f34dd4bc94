"""The training that a slice check makes: a small network on numbers that it draws itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tpu_trainer.task.task import Hyperparameters, Task

_WIDTH = 256


def make(hp: Hyperparameters) -> Task:
    """Returns the task; its data is the same in every process."""
    numbers = torch.Generator().manual_seed(17)
    features = torch.randn(4 * hp.global_batch_size, _WIDTH, generator=numbers)
    labels = torch.randint(0, 10, (len(features),), generator=numbers)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(_WIDTH, 10))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Task(model=model, train=TensorDataset(features, labels), loss=loss)
