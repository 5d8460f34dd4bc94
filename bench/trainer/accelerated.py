"""The loop from Accelerate's documentation. It uses the XLA device because torch_xla can be imported."""

from __future__ import annotations

import torch_xla
from accelerate import Accelerator  # type: ignore[import-untyped]

from bench.trainer.models import loader, optimizer
from bench.trainer.reports import due, report
from tpu_trainer import Task


def train(task: Task, batch: int, steps: int) -> None:
    accelerator = Accelerator()
    model, update, batches = accelerator.prepare(task.model.train(), optimizer(task.model), loader(task, batch))
    rows = iter(batches)
    for step in range(1, steps + 1):
        loss = task.loss(model, next(rows))
        accelerator.backward(loss)
        update.step()
        update.zero_grad()
        if due(step, steps):
            torch_xla.sync()
            report(step, loss.item())
