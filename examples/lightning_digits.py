"""Handwritten digits as a LightningModule and a LightningDataModule, written for Lightning's own Trainer.

Neither knows about this project; `task` combines the two. The data is scikit-learn's 1797 images of 8x8 pixels.
"""

from __future__ import annotations

import pytorch_lightning as lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class Digits(lightning.LightningDataModule):
    """Pixels scaled to 0..1, shape [64], and the digit; every fifth image is held out."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        labels = torch.tensor(digits.target)
        held_out = torch.arange(len(images)) % 5 == 0
        self.train = TensorDataset(images[~held_out], labels[~held_out])
        self.held_out = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.held_out, batch_size=self.batch_size)


class Classifier(lightning.LightningModule):
    """A two-layer network under a one-cycle learning rate."""

    def __init__(self, hidden: int = 128, learning_rate: float = 0.1, weight_decay: float = 1e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        scores = self(images)
        self.accuracy(scores, labels)
        self.log("val_loss", nn.functional.cross_entropy(scores, labels))
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(
            self.parameters(),
            lr=self.hparams.learning_rate,
            momentum=0.9,
            weight_decay=self.hparams.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.hparams.learning_rate,
            total_steps=int(self.trainer.estimated_stepping_batches),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def task(learning_rate: float, weight_decay: float, hidden: int = 128) -> tuple[Classifier, Digits]:
    """Passes the recipe's rate and decay and `parameters.hidden` by name."""
    return Classifier(hidden, learning_rate, weight_decay), Digits()
