"""The models that the loops train, as tasks: `mlp`, `transformer`, `deep` and `images` are this trainer's entrypoints.

The first is bound by the loop's overhead around the device's work (a few milliseconds per step), the second by that
work, the third, of 150 parameters, by the tracing of its operations, and the last by its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench.trainer.images import Photographs
from tpu_trainer import Hyperparameters, Task

SEED = 3
LEARNING_RATE = 1e-3
"""The other arguments of AdamW are torch's defaults in every loop."""

POOL = 8192
LENGTH = 1_000_000
FEATURES, CLASSES = 784, 10
VOCABULARY, TOKENS, WIDTH, LAYERS, HEADS = 256, 64, 128, 4, 4
WORKERS = 2
"""Processes that read images, in every loop."""
DEEP = 12
"""Layers; each has 12 parameters, and the rest of the model 6."""


@dataclass(frozen=True)
class Model:
    """`batch`: examples per step; `task`: model and data; `chance`: the loss of a model that has learned nothing."""

    batch: int
    task: Callable[[], Task]
    chance: float


class Repeated(Dataset[Any]):
    """A pool of examples as one long dataset, so that no loop reaches the end of an epoch while it is timed."""

    def __init__(self, pool: TensorDataset) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        example: tuple[Tensor, ...] = self._pool[index % POOL]
        return example


class Block(nn.Module):
    """A pre-norm transformer block with causal attention; [b, TOKENS, WIDTH] -> the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mixing = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixing = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mixing(self.before_mixing(x))
        return result


class LanguageModel(nn.Module):
    """Tokens [b, TOKENS] -> logits of the next one [b, TOKENS, VOCABULARY]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.tokens(tokens) + self.positions))
        return result


def mlp(hp: Hyperparameters | None = None) -> Task:
    """784-512-512-10 on noisy points around ten centres."""
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(CLASSES, (POOL,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    points = centres[labels] / 15 + torch.randn(POOL, FEATURES, generator=generator)
    return Task(model=model, train=Repeated(TensorDataset(points, labels)), loss=_classification)


def transformer(hp: Hyperparameters | None = None, layers: int = LAYERS) -> Task:
    """Makes a causal language model on arithmetic progressions, which it can learn."""
    generator = torch.Generator().manual_seed(SEED)
    first = torch.randint(VOCABULARY, (POOL, 1), generator=generator)
    stride = torch.randint(1, 8, (POOL, 1), generator=generator)
    sequences = (first + stride * torch.arange(TOKENS + 1)) % VOCABULARY
    return Task(model=LanguageModel(layers), train=Repeated(TensorDataset(sequences)), loss=_next_token)


def images(hp: Hyperparameters | None = None) -> Task:
    """Makes a convolutional network on JPEG files, which cost more than it does."""
    layers: list[nn.Module] = []
    for before, after in pairwise((3, 16, 32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return Task(model=model, train=Photographs(), loss=_classification, workers=WORKERS)


def deep(hp: Hyperparameters | None = None) -> Task:
    """Makes the same with more layers and fewer examples in a step."""
    return transformer(layers=DEEP)


MODELS = {
    "mlp": Model(128, mlp, math.log(CLASSES)),
    "transformer": Model(16, transformer, math.log(VOCABULARY)),
    "deep": Model(2, deep, math.log(VOCABULARY)),
    "images": Model(32, images, math.log(CLASSES)),
}


def loader(task: Task, batch: int) -> DataLoader[Any]:
    """Makes the batches for the other loops: as many examples as this trainer's, read and collated the same way."""
    return DataLoader(task.train, batch_size=batch, shuffle=True, drop_last=True, num_workers=task.workers)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _classification(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    points, labels = batch
    return functional.cross_entropy(_on_xla(model(points)), labels)


def _next_token(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (sequences,) = batch
    logits = _on_xla(model(sequences[:, :-1]))
    return functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def _on_xla(output: Tensor) -> Tensor:
    """Eager PyTorch is twice as fast on a CPU: a loop that fell back to it would win."""
    if output.device.type != "xla":
        raise RuntimeError(f"this loop trains on {output.device}; only what runs on the XLA device may be compared")
    return output
