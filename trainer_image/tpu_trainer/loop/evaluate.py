"""Computes metrics over the held-out set, and counts every example once, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data.loading import evaluation_size, evaluation_workers, held_out, length_of, load, name_held_out
from tpu_trainer.data.order import GENERATORS, Share, keep_generators
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.loop.modes import evaluation_mode
from tpu_trainer.task.task import Batch, Evaluator, Metrics, Task

if TYPE_CHECKING:
    from torch.utils.data import Dataset


def evaluate(task: Task, rows: int, share: Share, backend: Backend, batches: int | None = None) -> dict[str, float]:
    """Returns the task's metrics over all processes, in batches of `rows` rows of this process; {} if it has none.

    Leaves the model's modules in the modes they were in. The task's workers read ahead. `batches`: the most per
    process. All replicas must have the same buffers (`Buffers.lent`).

    Raises:
        UserCodeError: the metrics raised, or returned something they must not.
    """
    if evaluation_size(task) == 0:
        return {}
    with evaluation_mode(task.model), torch.no_grad():
        results: dict[str, float] = {}
        for name, dataset in held_out(task).items():
            if (size := length_of(dataset, name_held_out(name))) == 0:
                continue
            if task.evaluator is not None:
                plan = plan_without_padding(size, rows, share)[:batches]
                missing = len(plan_without_padding(size, rows, replace(share, rank=0))[:batches]) - len(plan)
                return _by_evaluator(task.evaluator, _read(task, dataset, plan), missing, share, backend)
            assert task.metrics is not None
            plan = evaluation_plan(size, rows, share)[:batches]
            values = _by_example(task, task.metrics, _read(task, dataset, plan), backend)
            results |= {f"{name}/{metric}" if name else metric: value for metric, value in values.items()}
        return results


def try_evaluation(task: Task, rows: int, share: Share, backend: Backend) -> dict[str, float]:
    """Evaluates one batch, so that a broken evaluation shows before the training, not after it. Of the result, only the
    names have a meaning.

    Leaves no trace in the model's buffers or the host's random generators.

    Raises:
        UserCodeError: as `evaluate` does.
    """
    with torch.no_grad(), keep_generators():
        buffers = list(task.model.buffers())
        before = [buffer.detach().clone() for buffer in buffers]
        tried = evaluate(task, rows, share, backend, batches=1)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        backend.sync()
    # On v2 and v3 two replicas share a process's generators: none may begin to read while another restores them.
    backend.barrier()
    return tried


@dataclass(frozen=True)
class EvaluationBatch:
    """The examples of one batch, of which the first `counted` are no padding."""

    indices: list[int]
    counted: int


def evaluation_plan(size: int, rows: int, share: Share) -> list[EvaluationBatch]:
    """Divides `size` examples so that each is counted in exactly one batch of one process.

    All processes get the same number of batches, each of `rows` rows, because collectives and compiled graphs
    need equal shapes everywhere. Rows past the end repeat example 0 and are not counted.
    """
    stride = rows * share.world
    starts = range(share.rank * rows, -(-size // stride) * stride, stride)
    return [
        EvaluationBatch([i if i < size else 0 for i in range(start, start + rows)], min(rows, max(0, size - start)))
        for start in starts
    ]


def plan_without_padding(size: int, rows: int, share: Share) -> list[EvaluationBatch]:
    """Plans an evaluation without padding rows: full batches, then at most one smaller one, which costs a compilation.

    Processes may have different numbers of batches, but each has at least one: a process without an example gets
    example 0, uncounted.
    """
    stride = rows * share.world
    full = size // stride
    batches = [range(start, start + rows) for start in range(share.rank * rows, full * stride, stride)]
    rest = range(full * stride, size)
    # The first `more` processes have one example more than the others.
    fewest, more = divmod(len(rest), share.world)
    begin = share.rank * fewest + min(share.rank, more)
    if last := rest[begin : begin + fewest + (share.rank < more)]:
        batches.append(last)
    if not batches:
        return [EvaluationBatch([0], 0)]
    return [EvaluationBatch(list(batch), len(batch)) for batch in batches]


def _read(
    task: Task, dataset: Dataset[Any], plan: Sequence[EvaluationBatch]
) -> Iterator[tuple[tuple[Batch, Tensor], EvaluationBatch]]:
    """Yields the plan's batches, collated, on the CPU, with the weights of their rows and their entries in the plan.

    The task's workers read, if it has any, also a single batch: otherwise this process would open the dataset's file,
    and workers would share the position in it.
    """
    workers = evaluation_workers(task, dataset)
    workers = replace(workers, count=min(workers.count, len(plan)))
    read = load(dataset, [batch.indices for batch in plan], task.evaluation_collate or task.collate, workers)
    for planned in plan:
        # Random numbers drawn here must not mix with those of a training batch that is read meanwhile.
        with nullcontext() if workers.count else GENERATORS:
            batch = next(read)
        yield (batch, (torch.arange(len(planned.indices)) < planned.counted).float()), planned


def _by_example(
    task: Task, metrics: Metrics, read: Iterator[tuple[tuple[Batch, Tensor], EvaluationBatch]], backend: Backend
) -> dict[str, float]:
    """Returns the mean of every metric. Sums stay on the device, and are exchanged once, at the end."""
    names: list[str] = []
    sums: Tensor | None = None
    with backend.feed(read) as batches:
        for (placed, weights), _ in batches:
            with user_code("the task's metrics"):
                values = metrics(task.model, placed)
            if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
                raise UserCodeError(f"the task's metrics must be tensors by name, in a dict; got {values!r:.200}")
            names = names or list(values)
            row = _weighted_sums(values, names, weights, backend)
            sums = row if sums is None else sums + row
            backend.sync()
    assert sums is not None
    _, totals = backend.reduce([], sums)
    *parts, count = totals.tolist()
    return {name: part / count for name, part in zip(names, parts, strict=True)}


def _by_evaluator(
    evaluator: Evaluator,
    read: Iterator[tuple[tuple[Batch, Tensor], EvaluationBatch]],
    missing: int,
    share: Share,
    backend: Backend,
) -> dict[str, float]:
    """Returns the evaluator's metrics, over batches of unequal sizes; only its `ends` calls collectives. `missing`: how
    many more batches the process with the most has."""
    if backend.terms != share.world:
        raise UserCodeError(
            "the task's evaluator needs batches of this process alone, and on this backend a batch belongs to all "
            "hosts; use backend xla, or a Task with per-example `metrics`"
        )
    with user_code("the task's evaluator"):
        evaluator.begins()
    with backend.feed(read) as batches:
        for index, ((placed, _), planned) in enumerate(batches):
            with user_code("the task's evaluator"):
                evaluator.batch(placed, index, planned.counted)
            backend.sync()
        # All processes make the same number of cuts, also one with fewer batches.
        for _ in range(missing):
            backend.sync()
    # Not marked as the user's code: the collectives in it can fail too.
    result = evaluator.ends(backend)
    # Pending work, such as metrics that were reset, would be compiled into the next training step.
    backend.sync()
    return result


def _weighted_sums(values: Mapping[str, Tensor], names: Sequence[str], weights: Tensor, backend: Backend) -> Tensor:
    """Returns each metric's sum over counted rows, then the number of counted rows: shape [len(names) + 1].

    A metric may be computed on the host.
    """
    if sorted(values) != sorted(names):
        raise UserCodeError(f"the task's metrics must be the same for every batch: {list(values)} after {list(names)}")
    for name in sorted({"loss", "step"} & values.keys()):
        raise UserCodeError(f'the name "{name}" is taken by the training\'s; call the metric "evaluation_{name}"')
    for name in names:
        if not isinstance(values[name], Tensor):
            raise UserCodeError(
                f"the task's metric {name} must be a tensor with one value per example, shape {list(weights.shape)}, "
                f"got a {type(values[name]).__name__}"
            )
        if values[name].shape != weights.shape:
            raise UserCodeError(
                f"the task's metric {name} must have one value per example, shape {list(weights.shape)}, got shape "
                f"{list(values[name].shape)}"
            )
        if values[name].is_complex():
            raise UserCodeError(f"the task's metric {name} must be of real numbers, got {values[name].dtype}")
    columns = [values[name].float() for name in names]
    placed = [column if column.device == weights.device else backend.to_device(column) for column in columns]
    # Not multiplied: a padding row's value may be NaN, and 0 x NaN is NaN.
    sums = [torch.where(weights > 0, column, 0.0).sum() for column in placed]
    return torch.stack([*sums, weights.sum()])
