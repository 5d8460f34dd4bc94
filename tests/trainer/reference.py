"""The trajectory every gang must reproduce: plain PyTorch, one process, the whole global batch, no exchange."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.trainer import tasks
from tpu_trainer.data.order import permutation


class Reference(NamedTuple):
    """`average`: the moving average of the weights, by name, with the decay that was asked for. `norms`: of each step's
    gradient, before clipping."""

    losses: list[float]
    average: dict[str, Tensor]
    norms: list[float]


def reference_losses(optimizer: str, steps: int, warmup: int, batch: int, seed: int) -> list[float]:
    """The loss of every step of `tasks.small` with the recipe of `gang.run_spec`."""
    return reference_run(optimizer, steps, warmup, batch, seed).losses


def reference_run(
    optimizer: str, steps: int, warmup: int, batch: int, seed: int, decay: float = 0.0, limit: float = math.inf
) -> Reference:
    """`limit`: gradients are clipped to this norm."""
    torch.manual_seed(seed)
    model = tasks.Network()
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rate = {"sgd": 0.3, "adamw": 0.02}[optimizer]
    if optimizer == "sgd":
        rule = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    else:
        rule = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-4)
    features, labels = tasks.examples().tensors
    per_epoch = tasks.EXAMPLES // batch
    losses, norms = [], []
    for step in range(steps):
        epoch, j = divmod(step, per_epoch)
        rows = torch.tensor(permutation(tasks.EXAMPLES, seed, epoch)[j * batch : (j + 1) * batch])
        for group in rule.param_groups:
            group["lr"] = rate * (step + 1) / warmup if step < warmup else rate
        rule.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(features[rows]), labels[rows])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        rule.step()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * parameter.detach()
    return Reference(losses, average, norms)
