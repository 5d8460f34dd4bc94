"""The plain PyTorch that a run is compared with: one process, the whole global batch, in the trainer's order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.trainer import tasks
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
    update: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: optimizer.step(),
) -> tuple[nn.Module, list[float]]:
    """The model after `steps` steps, and the loss of each. `before`: called with the index of every step. `update`:
    what is done with the gradients."""
    torch.manual_seed(SEED)
    model = make()
    rule = optimizer(model)
    losses = []
    for step, batch in enumerate(batches(data, steps)):
        before(model, rule, step)
        rule.zero_grad()
        value = loss(model, batch)
        value.backward()
        update(model, rule)
        losses.append(value.item())
    return model, losses


RECIPES = {
    "sgd": partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=1e-4),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=1e-4),
}
WARMUP = 5


def small(optimizer: str, **how: Any) -> list[float]:
    """The loss of each of the 24 steps of `tasks.small` with the recipe of `gang_processes.run_spec`."""

    def warm_up(model: nn.Module, rule: torch.optim.Optimizer, step: int) -> None:
        for group in rule.param_groups:
            group["lr"] = RECIPES[optimizer].keywords["lr"] * min(1.0, (step + 1) / WARMUP)

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return RECIPES[optimizer](model.parameters())

    return trained(tasks.Network, tasks.examples(), tasks.loss, build, steps=24, before=warm_up, **how)[1]


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two parameters of the same place."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)
