"""Metrics over the held-out set: every example counted once, whatever the number of processes. Called by `replica`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tpu_trainer.backends.base import Backend
from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.task import Batch, Metrics, Task


def evaluate(
    task: Task, metrics: Metrics, batches: Iterator[tuple[Batch, list[float]]], backend: Backend
) -> dict[str, float]:
    """The mean of every metric over all counted examples of all processes.

    Sums stay on the device and cross between processes once, at the end.

    Raises:
        UserCodeError: the metrics raised, or are not one value per example.
    """
    model = task.model.eval()
    # Running statistics (batch norm) belong to each replica's own examples; what is evaluated is one model,
    # rank 0's.
    backend.broadcast(list(model.buffers()))
    names: list[str] = []
    sums: Tensor | None = None
    with torch.no_grad():
        for batch, counted in batches:
            placed, weights = backend.to_device((batch, torch.tensor(counted)))
            with user_code("the task's metrics"):
                values = metrics(model, placed)
            names = names or list(values)
            row = _weighted_sums(values, names, weights)
            sums = row if sums is None else sums + row
            backend.sync()
    if sums is None:
        return {}
    _, totals = backend.reduce_bucket([], sums)
    *parts, count = totals.tolist()
    return {name: part / count for name, part in zip(names, parts, strict=True)}


def _weighted_sums(values: Mapping[str, Tensor], names: Sequence[str], weights: Tensor) -> Tensor:
    """Per metric the sum over counted rows, then the number of counted rows: shape [len(names) + 1]."""
    if sorted(values) != sorted(names):
        raise UserCodeError(f"the task's metrics must be the same for every batch: {list(values)} after {list(names)}")
    if "loss" in values:
        raise UserCodeError('the name "loss" is taken by the training loss; call the metric "evaluation_loss"')
    for name in names:
        if values[name].shape != weights.shape:
            raise UserCodeError(
                f"the task's metric {name} must have one value per example, shape {list(weights.shape)}, got shape "
                f"{list(values[name].shape)}"
            )
    # Chosen, not multiplied: a filling row's value may be NaN, and 0 x NaN is NaN.
    sums = [torch.where(weights > 0, values[name].float(), 0.0).sum() for name in names]
    return torch.stack([*sums, weights.sum()])
