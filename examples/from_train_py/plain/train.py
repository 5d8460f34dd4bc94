"""Handwritten digits: model, data and loss of the script; the trainer has the loop."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from tpu_trainer import Task


class Digits(Dataset):
    """scikit-learn's images, shape [1, 8, 8], and the digit; every fifth is held out."""

    def __init__(self, train):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        kept = (torch.arange(len(images)) % 5 == 0) != train
        self.images, self.labels, self.train = images[kept], labels[kept], train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train:
            image = image + 0.02 * torch.randn(image.shape)
        return image, self.labels[index]


def build(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * width, 10),
    )


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)


def metrics(model, batch):
    images, labels = batch
    return {"accuracy": model(images).argmax(dim=1) == labels}


def task(width: int = 16, workers: int = 2):
    return Task(build(width), Digits(True), loss, evaluation=Digits(False), metrics=metrics, workers=workers)
