"""The trajectory every gang must reproduce: plain PyTorch, one process, the whole global batch, no bucket."""

from __future__ import annotations

import torch

from tests.trainer import tasks
from tpu_trainer.data import permutation


def reference_losses(optimizer: str, steps: int, warmup: int, batch: int, seed: int) -> list[float]:
    """The loss of every step of `tasks.small` with the recipe of `gang.run_spec`."""
    torch.manual_seed(seed)
    model = tasks.Network()
    rate = {"sgd": 0.3, "adamw": 0.02}[optimizer]
    if optimizer == "sgd":
        rule = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    else:
        rule = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-4)
    features, labels = tasks.examples().tensors
    per_epoch = tasks.EXAMPLES // batch
    losses = []
    for step in range(steps):
        epoch, j = divmod(step, per_epoch)
        rows = torch.tensor(permutation(tasks.EXAMPLES, seed, epoch)[j * batch : (j + 1) * batch])
        for group in rule.param_groups:
            group["lr"] = rate * (step + 1) / warmup if step < warmup else rate
        rule.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(features[rows]), labels[rows])
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return losses
