"""The data and models of the bench: each function is the entrypoint of its tasks. Nothing is downloaded."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from examples.digits import split
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional

from tpu_trainer import Hyperparameters, Task

Batch = tuple[Tensor, ...]

LETTERS, CONTEXT, WIDTH, HEADS = 128, 16, 32, 2
"""Of the language model: ASCII, and one block of a transformer."""
TEXTS, _HELD_OUT_TEXTS, _EVERY = 60_000, 512, 10


class Table(NamedTuple):
    """Columns of equal length: first the examples to train with, then those held out."""

    columns: Batch
    examples: int


def digits(hp: Hyperparameters) -> Task:
    """scikit-learn's 1797 handwritten digits; every fifth is held out."""
    return _task(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), _digits(), _loss, _metrics)


def tumours(hp: Hyperparameters) -> Task:
    """scikit-learn's table of 569 breast tumours; every second is held out."""
    return _task(nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2)), _tumours(), _loss, _metrics)


def text(hp: Hyperparameters) -> Task:
    """Returns the source text of Python's standard library, byte by byte; every tenth file is held out."""
    return _task(Letters(), _text(), _text_loss, _text_metrics)


def _task(
    model: nn.Module,
    table: Table,
    loss: Callable[[nn.Module, Batch], Tensor],
    metrics: Callable[[nn.Module, Batch], dict[str, Tensor]],
) -> Task:
    # An example is the number of its row: a batch is read at once, because row by row takes longer than a small step.
    train: Any = range(table.examples)
    held_out: Any = range(table.examples, len(table.columns[0]))

    def rows(numbers: list[int]) -> Batch:
        return tuple(column[numbers] for column in table.columns)

    return Task(model=model, train=train, loss=loss, evaluation=held_out, metrics=metrics, collate=rows)


class Letters(nn.Module):
    """One pre-norm block with causal attention; letters [b, CONTEXT] -> scores of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.before_attention, self.before_mixing = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixing = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.scores = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS))

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places
        query, key, value = self.attention(self.before_attention(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        scores: Tensor = self.scores(x + self.mixing(self.before_mixing(x)))
        return scores


@cache
def _digits() -> Table:
    train, held_out = split()
    return Table(tuple(map(torch.cat, zip(train.tensors, held_out.tensors, strict=True))), len(train))


@cache
def _tumours() -> Table:
    values, kinds = map(torch.tensor, load_breast_cancer(return_X_y=True))
    held_out = torch.arange(len(values)) % 2 == 0
    known = values[~held_out]
    order = torch.argsort(held_out, stable=True)
    return Table((((values - known.mean(dim=0)) / known.std(dim=0)).float()[order], kinds[order]), len(known))


@cache
def _text() -> Table:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train = _pieces(file for number, file in enumerate(files) if number % _EVERY)[:TEXTS]
    held_out = _pieces(files[::_EVERY])
    held_out = held_out[:: len(held_out) // _HELD_OUT_TEXTS][:_HELD_OUT_TEXTS]
    return Table((torch.cat([train, held_out]),), len(train))


def _pieces(files: Iterable[Path]) -> Tensor:
    """Returns pieces of CONTEXT + 1 letters, one after the other."""
    text = b"".join(file.read_bytes() for file in files).decode("ascii", "ignore").encode()
    letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return letters[: len(letters) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def _metrics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    inputs, labels = batch
    scores = model(inputs)
    nats = functional.cross_entropy(scores, labels, reduction="none")
    return {"accuracy": scores.argmax(dim=1) == labels, "nats": nats}


def _text_loss(model: nn.Module, batch: Batch) -> Tensor:
    return _nats(model, batch).mean()


def _text_metrics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"nats": _nats(model, batch).mean(dim=1)}


def _nats(model: nn.Module, batch: Batch) -> Tensor:
    """Returns what each letter costs, [b, CONTEXT]."""
    text = batch[0].long()
    return functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none")
