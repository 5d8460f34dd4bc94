"""Tasks whose steps are compiled for a TPU, but never run."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tpu_trainer import Hyperparameters, Task


class Zeros(Dataset[tuple[Tensor, Tensor]]):
    """As many examples as anyone asks for, which take no memory."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(self._width), torch.zeros(self._width)


def deep(hp: Hyperparameters, width: int, layers: int) -> Task:
    """`layers` square layers, each followed by a ReLU: so large that memory shows, and quickly compiled."""
    model = nn.Sequential(*(part for _ in range(layers) for part in (_Square(width), nn.ReLU())))
    return Task(model=model, train=Zeros(width), loss=_distance)


def of_all_kinds(hp: Hyperparameters) -> Task:
    """A parameter of each type of number that gradients have."""
    return Task(model=_OfAllKinds(), train=Zeros(4), loss=_distance)


def _distance(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).float(), targets)


class _Square(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def reset_parameters(self) -> None:
        """Leaves the weights as they are: filling so many with random numbers takes longer than all the rest."""


class _OfAllKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.as_float = nn.Parameter(torch.ones(4))
        self.as_double = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.as_bfloat16 = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.as_complex = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = torch.view_as_real(self.as_complex)
        return inputs * self.as_float * self.as_double * self.as_bfloat16 * pairs[:, 0] * pairs[:, 1] + self.empty.sum()


def small(hp: Hyperparameters, width: int = 256, layers: int = 3) -> Task:
    """The layers of `deep`, between inputs and outputs of 8 numbers: activations of megabytes, inputs of bytes."""
    inner = (part for _ in range(layers) for part in (_Square(width), nn.ReLU()))
    return Task(model=nn.Sequential(nn.Linear(8, width), *inner, nn.Linear(width, 8)), train=Zeros(8), loss=_distance)


def reads_a_number(hp: Hyperparameters) -> Task:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = _distance(model, batch)
        return found / max(found.item(), 1.0)  # reads

    return Task(model=nn.Linear(8, 8), train=Zeros(8), loss=loss)


def masks(hp: Hyperparameters) -> Task:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0])
        return outputs[outputs > 0].sum()  # masks

    return Task(model=nn.Linear(8, 8), train=Zeros(8), loss=loss)


def grows(hp: Hyperparameters) -> Task:
    """Every batch is longer than the one before."""
    batches = count(1)

    def collate(examples: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.zeros(len(examples), next(batches), 8)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()  # grows

    return Task(model=nn.Linear(8, 8), train=Zeros(8), loss=loss, collate=collate)
