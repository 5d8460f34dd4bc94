"""Training loops written by hand for torch_xla: the best known one, and the one that tutorials show."""

from __future__ import annotations

import torch
import torch_xla
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from bench.trainer.models import loader, optimizer
from bench.trainer.reports import due, report
from tpu_trainer import Task


def best(task: Task, batch: int, steps: int) -> None:
    """Trains with a thread that sends batches ahead; gradients are freed before the sync, so that they are not outputs
    of the graph."""
    device = torch_xla.device()
    model = task.model.train().to(device)
    update = optimizer(model)
    batches = iter(MpDeviceLoader(loader(task, batch), device))
    before = torch.tensor(float("nan"))
    for step in range(1, steps + 1):
        # The loader's next() syncs what the previous step traced.
        loss = task.loss(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        update.step()
        update.zero_grad()
        if due(step, steps):
            # Synced first: reading a pending value would compile and run its own graph. And the loss of the step
            # before, so that the device is not left without work while the host waits.
            torch_xla.sync()
            report(step - 1, before.item())
        before = loss
    report(steps, before.item())


def naive(task: Task, batch: int, steps: int) -> None:
    """Moves each batch when its turn comes; keeps gradients until the next step begins."""
    device = torch_xla.device()
    model = task.model.train().to(device)
    update = optimizer(model)
    batches = iter(loader(task, batch))
    for step in range(1, steps + 1):
        placed = [tensor.to(device) for tensor in next(batches)]
        update.zero_grad()
        loss = task.loss(model, placed)
        loss.backward()  # type: ignore[no-untyped-call]
        update.step()
        torch_xla.sync()
        if due(step, steps):
            report(step, loss.item())
