"""Handwritten digits: a training script for one GPU, as many are written."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset


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


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Digits(True), args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers)
    held_out = DataLoader(Digits(False), 256)
    model = build(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        model.train()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in held_out:
                right += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {right / len(held_out.dataset):.3f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
