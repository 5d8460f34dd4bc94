"""Tasks that the process tests name as entrypoints: tiny, and each with one thing the trainer must cope with."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tpu_trainer import Hyperparameters, Task, log

CLASSES = 3
EXAMPLES = 72
"""Not a multiple of the tests' global batch of 16, so that every epoch drops a remainder."""


class Network(nn.Module):
    """Shares one weight between two layers, and holds a buffer with -inf: both are easily lost on the way to XLA.

    The mask rules out a fourth class, which no label names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, CLASSES + 1)
        self.register_buffer("mask", torch.tensor([0.0] * CLASSES + [float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(hidden) + self.mask


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(EXAMPLES, 8, generator=generator)
    return TensorDataset(features, torch.randint(0, CLASSES, (EXAMPLES,), generator=generator))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels)


def small(hp: Hyperparameters) -> Task:
    return Task(model=Network(), train=examples(), loss=loss)


def talkative(rarely: bool = False) -> Task:
    """Logs what may cost a program, a wait or an exchange: tensors and numbers, weighted and not; `rarely`: one more in
    every fifth step."""
    calls = 0

    def logging(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        value = loss(model, batch)
        log("half", value / 2)
        log("calls", calls)
        log("weighted", value, weight=calls)
        log("by tensor", calls, weight=(batch[1] == 1).sum())
        if rarely and calls % 5 == 0:
            log("every fifth", value)
        return value

    return Task(model=Network(), train=examples(), loss=logging)


def uneven_start(hp: Hyperparameters) -> Task:
    """Every host begins with other weights; only rank 0's may count."""
    torch.manual_seed(hp.seed + 100 * int(os.environ["TPUJOB_HOST_INDEX"]))
    return small(hp)


def one_host_fails(hp: Hyperparameters) -> Task:
    """The loss of host 1 raises in its third step."""
    calls = 0

    def failing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3 and os.environ["TPUJOB_HOST_INDEX"] == "1":
            raise ValueError("the labels of this shard are broken")
        return loss(model, batch)

    return Task(model=Network(), train=examples(), loss=failing)


def one_process_dies(hp: Hyperparameters) -> Task:
    """In its third step the second process of host 1 is killed, as by the kernel when memory runs out."""
    calls = 0

    def dying(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3 and (os.environ["TPUJOB_HOST_INDEX"], os.environ["LOCAL_RANK"]) == ("1", "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    return Task(model=Network(), train=examples(), loss=dying)


def one_process_leaves(hp: Hyperparameters) -> Task:
    """In its third step the second process of a host exits as if all were done."""
    calls = 0

    def leaving(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3 and os.environ["LOCAL_RANK"] == "1":
            os._exit(0)
        return loss(model, batch)

    return Task(model=Network(), train=examples(), loss=leaving)


def weighed(hp: Hyperparameters) -> Task:
    """Its metric is the length of the weights that are evaluated."""

    def metrics(model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
        length = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum().sqrt()
        return {"length": length.expand(len(batch[0]))}

    evaluation = TensorDataset(torch.arange(5))
    return Task(model=Network(), train=examples(), loss=loss, evaluation=evaluation, metrics=metrics)


def counted(hp: Hyperparameters) -> Task:
    """Its metrics show how often each example was evaluated: example i counts 2**-(i % 8)."""
    evaluation = TensorDataset(torch.arange(37))

    def metrics(model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
        (index,) = batch
        return {"weight": 0.5 ** (index % 8), "first": torch.where(index == 0, 1.0, 0.0)}

    return Task(model=Network(), train=examples(), loss=loss, evaluation=evaluation, metrics=metrics)


def measured_on_the_host(hp: Hyperparameters) -> Task:
    """As with scikit-learn, whose results come from numpy."""

    def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"half": torch.full((len(batch[1]),), 0.5, dtype=torch.float64)}

    return replace(small(hp), evaluation=examples(), metrics=metrics)
