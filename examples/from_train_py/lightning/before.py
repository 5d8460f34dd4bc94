"""Handwritten digits: a LightningModule with Lightning's Trainer."""

import pytorch_lightning as lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Digits(lightning.LightningDataModule):
    """scikit-learn's images, shape [64], and the digit; every fifth is held out."""

    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        labels = torch.tensor(digits.target)
        held_out = torch.arange(len(images)) % 5 == 0
        self.train = TensorDataset(images[~held_out], labels[~held_out])
        self.held_out = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=32)


class Classifier(lightning.LightningModule):
    def __init__(self, hidden=128):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.network(images), labels)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 352)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(max_epochs=8)
    trainer.fit(Classifier(), datamodule=Digits())
    print(trainer.callback_metrics)
