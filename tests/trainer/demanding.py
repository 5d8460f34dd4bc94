"""Tasks that ask more of a device than most: entrypoints of runs on stand-in chips, compared with plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tpu_trainer import Hyperparameters, Task

CLASSES = torch.tensor([0.2, 3.0, 1.0])
BAD = -1000.0
"""The first feature of an example that makes the loss infinite."""


class Mixed(nn.Module):
    """Complex weights, batch statistics, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)
        self.spare = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.to(torch.complex64) @ self.mix
        return self.head(self.norm(mixed.real + mixed.imag))


def examples(broken: bool = False) -> TensorDataset:
    """One of 64 is broken, or none."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(64, 6, generator=generator)
    features[:, 0] = torch.where(torch.arange(64) == (37 if broken else -1), BAD, features[:, 0])
    return TensorDataset(features, torch.randint(0, 3, (64,), generator=generator))


def parts(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    features, labels = batch
    classes = CLASSES.to(labels.device)
    total = nn.functional.cross_entropy(model(features), labels, weight=classes, reduction="sum")
    return total * torch.where((features[:, 0] == BAD).any(), float("inf"), 1.0), classes[labels].sum()


def outputs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Seen in evaluation, where the running statistics count."""
    return {"output": model(batch[0]).square().mean(1)}


def task(hp: Hyperparameters) -> Task:
    """Complex weights, a weighted loss, and one step in four that is not finite."""
    return Task(
        model=Mixed(),
        train=examples(broken=True),
        loss=parts,
        evaluation=examples(),
        metrics=outputs,
    )
