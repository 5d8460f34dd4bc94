"""The plain PyTorch that a run is compared with: one process, the whole global batch, in the trainer's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpu_trainer.data.order import permutation

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

BATCH, SEED = 16, 3


def batches(data: TensorDataset, steps: int) -> list[tuple[Tensor, ...]]:
    """Those of every step, of BATCH examples each."""
    per_epoch = len(data) // BATCH
    made = []
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        rows = torch.tensor(permutation(len(data), SEED, epoch)[place * BATCH : (place + 1) * BATCH])
        made.append(tuple(tensor[rows] for tensor in data.tensors))
    return made


def trained(
    make: Callable[[], nn.Module],
    data: TensorDataset,
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    steps: int = 40,
    before: Callable[[nn.Module, torch.optim.Optimizer, int], None] = lambda model, optimizer, step: None,
) -> tuple[nn.Module, list[float]]:
    """The model after `steps` steps, and the loss of each; `before`: called with the index of every step."""
    torch.manual_seed(SEED)
    model = make()
    rule = optimizer(model)
    losses = []
    for step, batch in enumerate(batches(data, steps)):
        before(model, rule, step)
        rule.zero_grad()
        value = loss(model, batch)
        value.backward()
        rule.step()
        losses.append(value.item())
    return model, losses


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two parameters of the same place."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)
