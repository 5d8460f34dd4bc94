"""PyTorch Lightning's Trainer: stripped to the minimum, and with its defaults."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.accelerators import XLAAccelerator
from torch import Tensor

from bench.trainer.models import loader, optimizer
from bench.trainer.reports import due, report
from tpu_trainer import Task


def lean(task: Task, batch: int, steps: int) -> None:
    """Trains without progress bar, logger, checkpoints and summary."""
    without = dict.fromkeys(("enable_progress_bar", "logger", "enable_checkpointing", "enable_model_summary"), False)
    _fit(Module(task, logs=False), task, batch, steps, without)


def default(task: Task, batch: int, steps: int) -> None:
    """Trainer() without arguments, and the usual self.log of the loss."""
    _fit(Module(task, logs=True), task, batch, steps, {})


class XlaCpu(XLAAccelerator):
    """Lightning looks for TPU chips before it lets its XLA code run; here XLA's CPU device poses as one."""

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]
        return True

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("xla", 0)]


class Module(LightningModule):
    def __init__(self, task: Task, logs: bool) -> None:
        super().__init__()
        self.model = task.model
        self._task = task
        self._logs = logs

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self._task.loss(self.model, batch)
        if self._logs:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self)


class Reports(Callback):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *rest: Any) -> None:
        if due(trainer.global_step, self._steps):
            report(trainer.global_step, outputs["loss"].item())


def _fit(module: Module, task: Task, batch: int, steps: int, options: dict[str, bool]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator=XlaCpu(),
            devices=1,
            max_steps=steps,
            callbacks=[Reports(steps)],
            default_root_dir=directory,
            **options,  # type: ignore[arg-type]
        )
        trainer.fit(module, loader(task, batch))
