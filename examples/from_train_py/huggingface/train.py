"""Handwritten digits: the Trainer's model and data; its arguments are the job's recipe."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification

from tpu_trainer import Task


class Digits(Dataset):
    """scikit-learn's images as a vision transformer reads them; every fifth is held out."""

    def __init__(self, train):
        digits = load_digits()
        kept = (np.arange(len(digits.target)) % 5 == 0) != train
        self.images, self.labels = digits.images[kept] / 16, digits.target[kept]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        pixels = torch.tensor(self.images[index], dtype=torch.float32).unsqueeze(0)
        return {"pixel_values": pixels, "labels": int(self.labels[index])}


def build():
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        num_labels=10,
    )
    return ViTForImageClassification(config)


def loss(model, batch):
    return model(**batch).loss


def metrics(model, batch):
    return {"accuracy": model(batch["pixel_values"]).logits.argmax(dim=1) == batch["labels"]}


def task():
    return Task(build(), Digits(True), loss, evaluation=Digits(False), metrics=metrics)
