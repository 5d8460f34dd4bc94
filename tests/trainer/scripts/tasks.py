"""Well-known training scripts as Tasks, on tiny data: what their authors wrote stays, the loop around it goes."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it
from torch.utils.data import TensorDataset

from tpu_trainer import Task


def mnist(learning_rate):
    """A convolutional network with dropout, log-softmax and NLL, on images whose brighter half is the label."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
            self.dropout = nn.Dropout(0.1)
            self.fc = nn.Linear(8 * 4 * 4, 2)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
            return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)

    def loss(model, batch):
        images, labels = batch
        return F.nll_loss(model(images), labels)

    def metrics(model, batch):
        images, labels = batch
        return {"accuracy": (model(images).argmax(1) == labels).float()}

    images, labels = pictures(256, 12)
    data = TensorDataset(images, labels)
    return Task(
        Net(),
        data,
        loss,
        evaluation=data,
        metrics=metrics,
        optimizer=lambda p, hp: torch.optim.Adadelta(p, lr=hp.learning_rate),
    )


def mixup(learning_rate, weight_decay):
    """Mixed-up batches from the collate function, label smoothing, no decay for norms and biases."""
    classes = 2

    def collate(rows):
        images = torch.stack([row[0] for row in rows])
        labels = F.one_hot(torch.stack([row[1] for row in rows]), classes).float()
        share = torch.distributions.Beta(0.4, 0.4).sample()
        return share * images + (1 - share) * images.roll(1, 0), share * labels + (1 - share) * labels.roll(1, 0)

    def loss(model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=0.1)

    def optimizer(parameters, hp):
        decayed = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": hp.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=hp.learning_rate, momentum=0.9)

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    )
    return Task(model, TensorDataset(*pictures(256, 8)), loss, collate=collate, optimizer=optimizer)


@dataclass
class GPTConfig:
    vocabulary: int = 16
    block_size: int = 16
    width: int = 32
    heads: int = 2
    layers: int = 2


class GPT(nn.Module):
    """Pre-norm blocks with causal attention; the embedding and the head share their weight."""

    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.block_size, config.width)
        block = nn.TransformerEncoderLayer(
            config.width, config.heads, 4 * config.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, config.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, idx, targets):
        length = idx.shape[1]
        hidden = self.tokens(idx) + self.places(torch.arange(length, device=idx.device))
        mask = torch.full((length, length), -math.inf, device=idx.device).triu(1)
        logits = self.head(self.norm(self.blocks(hidden, mask=mask)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(learning_rate, weight_decay, beta1=0.9, beta2=0.95):
    def optimizer(parameters, hp):
        matrices = [p for p in parameters if p.dim() >= 2]
        vectors = [p for p in parameters if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=hp.learning_rate, betas=(beta1, beta2))

    config = GPTConfig()
    text = counting(2000, config.vocabulary)
    windows = text.unfold(0, config.block_size + 1, 1)
    data = TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
    return Task(GPT(config), data, lambda model, batch: model(*batch)[1], optimizer=optimizer)


def word_lm(parameters_per_word: int = 16):
    """A recurrent language model on padded sentences; padding counts for nothing."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Embedding(17, parameters_per_word, padding_idx=16)
            self.rnn = nn.LSTM(parameters_per_word, 32, batch_first=True)
            self.decoder = nn.Linear(32, 17)

        def forward(self, words):
            return self.decoder(self.rnn(self.encoder(words))[0])

    def loss(model, batch):
        (words,) = batch
        logits, targets = model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
        return F.cross_entropy(logits, targets, ignore_index=16, reduction="sum"), (targets != 16).sum()

    sentences = counting(256 * 12, 16).reshape(256, 12)
    lengths = torch.randint(4, 13, (256, 1), generator=torch.Generator().manual_seed(1))
    sentences = sentences.masked_fill(torch.arange(12) >= lengths, 16)
    return Task(Model(), TensorDataset(sentences), loss)


def pictures(count, size):
    """Images of noise, brighter in their upper or in their lower half, which is the label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (count,), generator=generator)
    images = torch.randn(count, 1, size, size, generator=generator)
    images[labels == 0, :, : size // 2] += 1
    images[labels == 1, :, size // 2 :] += 1
    return images, labels


def counting(count, vocabulary):
    """A text in which every token follows from the one before it."""
    return (torch.arange(count) * 3) % vocabulary
