"""Handwritten digits: scikit-learn's bundled 1797 images of 8x8 pixels, a two-layer network, held-out accuracy.

The smallest complete task. Copy it, replace model, data and loss, and name it in the job as `entrypoint: module:task`.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tpu_trainer import Hyperparameters, Task

Batch = tuple[Tensor, Tensor]


def task(hp: Hyperparameters) -> Task:
    """`parameters.hidden` sets the width of the hidden layer; every fifth image is held out."""
    train, held_out = split()
    hidden = int(hp.parameters.get("hidden", "128"))
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return Task(model=model, train=train, loss=loss, evaluation=held_out, metrics=metrics)


def split() -> tuple[TensorDataset, TensorDataset]:
    """1437 training examples and 360 held-out ones: pixels scaled to 0..1, shape [64], and the digit."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(images)) % 5 == 0
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def metrics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    images, labels = batch
    return {"accuracy": model(images).argmax(dim=1) == labels}
