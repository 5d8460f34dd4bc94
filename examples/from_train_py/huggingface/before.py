"""Handwritten digits: a small vision transformer with Hugging Face's Trainer."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


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


def compute_metrics(prediction):
    return {"accuracy": (prediction.predictions.argmax(axis=1) == prediction.label_ids).mean()}


if __name__ == "__main__":
    arguments = TrainingArguments(
        "vit",
        per_device_train_batch_size=32,
        num_train_epochs=12,
        learning_rate=2.5e-3,
        weight_decay=0.01,
        warmup_steps=30,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        eval_strategy="epoch",
        report_to="none",
        seed=0,
    )
    trainer = Trainer(build(), arguments, None, Digits(True), Digits(False), compute_metrics=compute_metrics)
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model("vit")
