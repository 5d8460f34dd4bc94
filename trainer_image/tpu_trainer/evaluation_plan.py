"""Which held-out examples a process evaluates in which batch: every example counted once, whatever the number of
processes. Called by `replica` and `evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpu_trainer.data import Share, length_of, load
from tpu_trainer.task import Batch, Task


@dataclass(frozen=True)
class EvaluationBatch:
    """Always the same number of rows; `counted[i]` is 0.0 for a row that only fills up, else 1.0."""

    indices: list[int]
    counted: list[float]


def evaluation_plan(size: int, rows: int, share: Share) -> list[EvaluationBatch]:
    """Shares `size` examples out so that every one is counted in exactly one batch of one process.

    All processes get the same number of batches, each of `rows` rows, because collectives and compiled graphs
    need equal shapes everywhere. Rows beyond the end repeat example 0 uncounted.
    """
    stride = rows * share.world
    starts = range(share.rank * rows, -(-size // stride) * stride, stride)
    return [
        EvaluationBatch(
            indices=[i if i < size else 0 for i in range(start, start + rows)],
            counted=[1.0 if i < size else 0.0 for i in range(start, start + rows)],
        )
        for start in starts
    ]


def evaluation_batches(task: Task, plan: Sequence[EvaluationBatch]) -> Iterator[tuple[Batch, list[float]]]:
    """The plan's batches, on the CPU, each with its row weights."""
    if task.evaluation is None:
        return iter(())
    batches = load(task, task.evaluation, [batch.indices for batch in plan])
    return zip(batches, (batch.counted for batch in plan), strict=True)


def evaluation_size(task: Task) -> int:
    """Examples to evaluate on; 0 for a task without evaluation."""
    return 0 if task.evaluation is None else length_of(task.evaluation, "evaluation")
