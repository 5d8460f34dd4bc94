"""A LightningModule as it is found in public code, for the tests: under the loop, under Lightning's own Trainer, and
trained by hand.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

CLASSES = 3
TRAINING, HELD_OUT = 48, 37
"""Examples: three steps of 16 in an epoch, and a held-out set that no number of processes divides."""


def examples(size: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(size, 8, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)
    )


class Data(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.train, self.held_out = examples(TRAINING, 7), examples(HELD_OUT, 8)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=8)


class Module(lightning.LightningModule):
    def __init__(self, lr: float = 0.3, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.margin = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        features, labels = batch
        loss = nn.functional.cross_entropy(self.network(features), labels)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        scores = self.network(features)
        self.accuracy.update(scores, labels)
        self.margin.update(scores.max(dim=1).values)
        self.log_dict({"val/loss": nn.functional.cross_entropy(scores, labels), "val/accuracy": self.accuracy})

    def on_validation_epoch_end(self) -> None:
        self.log("val/margin", self.margin.compute())
        self.margin.reset()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def pair(lr: float) -> tuple[Module, Data]:
    return Module(lr), Data()


HOOKS = (
    "prepare_data",
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "validation_step",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
)


class Recorder(Module):
    """Writes down which hook is called when, with the place that the trainer names at that moment."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.calls: list[list[Any]] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(examples(TRAINING, 7), batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(examples(HELD_OUT, 8), batch_size=8)


def _recording(name: str) -> Any:
    def hook(self: Recorder, *arguments: Any, **named: Any) -> Any:
        batch_index = arguments[-1] if name.endswith(("batch_start", "batch_end", "_step")) else None
        index = batch_index if isinstance(batch_index, int) else None
        called = f"validation {name}" if self.trainer.validating and "validation" not in name else name
        self.calls.append([called, self.current_epoch, self.global_step, index])
        if name == "teardown" and (file := os.environ.get("HOOK_CALLS")):
            Path(file).write_text(json.dumps(self.calls))
        return getattr(super(Recorder, self), name)(*arguments, **named)

    return hook


for _name in HOOKS:
    setattr(Recorder, _name, _recording(_name))
