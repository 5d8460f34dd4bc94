"""A task that says every twenty steps how many graphs XLA has compiled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from tests.trainer import tasks
from tpu_trainer import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

EVERY = 20


SPOILT = 240
"""Which of the examples that a process reads is not finite."""


class _Spoilt(Dataset[Any]):
    """One reading of one example has infinite features; data and program are those of any other."""

    def __init__(self, examples: Dataset[Any]) -> None:
        self._examples, self._read = examples, 0

    def __len__(self) -> int:
        return len(self._examples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self._read += 1
        features, label = self._examples[index]
        return (features * math.inf if self._read == SPOILT else features), label


def spoilt() -> Task:
    counting = task()
    return replace(counting, train=_Spoilt(counting.train))


def task() -> Task:
    """What is logged in some steps only is another program, which is compiled once, too."""
    # Here, because only a gang's process may have it.
    from torch_xla.debug import metrics

    talkative = tasks.talkative(rarely=True)
    passes = 0

    def counting(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal passes
        if passes and passes % EVERY == 0:
            print("compilations:", metrics.metric_data("CompileTime")[0], flush=True)
        passes += 1
        return talkative.loss(model, batch)

    return replace(talkative, loss=counting)
