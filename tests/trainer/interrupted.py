"""A task that is sent a signal at a place of its run that the test chooses, as a node or the kubelet would send it.

At the n-th call of the loss, or while the task is made (n = 0). It draws random numbers in the model and in the data,
which a run that continues must draw again.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from multiprocessing import parent_process

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.trainer import tasks
from tpu_trainer import Hyperparameters, Task

FAULT = "TEST_FAULT"
"""HOST:CALL:SIGNAL, such as 1:17:KILL."""


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise to every example as it is read."""

    def __init__(self) -> None:
        self._examples = tasks.examples()

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, label = self._examples[index]
        return features + 0.1 * torch.randn(8), label


class Dropping(tasks.Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.2, self.training))


def task(hp: Hyperparameters) -> Task:
    calls = count(1)
    host, call, name = os.environ.get(FAULT, "-1:0:KILL").split(":")
    mine = int(host) == int(os.environ["TPUJOB_HOST_INDEX"])

    def reached(place: int) -> None:
        if mine and place == int(call):
            # The kubelet asks the host's first process to stop, which is not a chip's process.
            asked = os.getppid() if name == "TERM" and parent_process() else os.getpid()
            os.kill(asked, signal.Signals[f"SIG{name}"])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        reached(next(calls))
        return tasks.loss(model, batch)

    reached(0)

    return Task(model=Dropping(), train=Noisy(), loss=loss)
