"""Trains with the recipe's optimizers on XLA's CPU device. Prints whose they are, whether the weights equal torch's on
the host, and how many programs were compiled after the third step, while the rates fell through 1, 0.1 and 0.

Run by `test_traced_optimizers`.
"""

from __future__ import annotations

import torch
import torch_xla
from torch import Tensor
from torch_xla.debug import metrics

from tests.trainer import tasks
from tests.trainer.gang_processes import run_spec
from tpu_trainer import Hyperparameters
from tpu_trainer.contract.environment import parse_run_spec
from tpu_trainer.gang.backends.base import move_model
from tpu_trainer.optim.optimizers import build_optimizer

NAMES = ("sgd", "adam", "adamw", "rmsprop")
RATES = [1.5, 1.2, 1.1, 1.0, 0.9, 0.1, 0.01, 0.001, 1e-8, 0.0, 0.2]


def trained(name: str, device: torch.device) -> tuple[str, list[Tensor], int]:
    """Returns whose the optimizer is, the weights at the end, and the number of late programs."""
    hp = Hyperparameters.of(parse_run_spec(run_spec(optimizer=name)))
    torch.manual_seed(3)
    task = tasks.small(hp)
    move_model(task.model, device)
    generator = torch.Generator().manual_seed(4)
    optimizer = build_optimizer(task, hp)
    early = 0
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for parameter in task.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch_xla.sync()
        if step == 2:
            early = metrics.counter_value("UncachedCompile") or 0
    late = (metrics.counter_value("UncachedCompile") or 0) - early
    return type(optimizer).__module__, [parameter.detach().cpu() for parameter in task.model.parameters()], late


for name in NAMES:
    _, expected, _ = trained(name, torch.device("cpu"))
    module, found, late = trained(name, torch_xla.device())
    equal = all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in zip(found, expected, strict=True))
    print(f"{name}: {module.rpartition('.')[2]}, equal {equal}, late programs {late}")
