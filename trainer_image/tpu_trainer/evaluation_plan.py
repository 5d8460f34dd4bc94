"""Which held-out examples a process evaluates in which batch: every example counted once, whatever the number of
processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tpu_trainer.data import Share, length_of, load
from tpu_trainer.task import Batch, Task


@dataclass(frozen=True)
class EvaluationBatch:
    """`counted[i]` is 0.0 for a row that only fills up, else 1.0."""

    indices: list[int]
    counted: list[float]

    @property
    def rows(self) -> int:
        """Rows that count."""
        return int(sum(self.counted))


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


def unfilled_plan(size: int, rows: int, share: Share) -> list[EvaluationBatch]:
    """As `evaluation_plan`, without rows that fill up: full batches, then at most one smaller one.

    The smaller one costs a compilation more. Processes may have different numbers of batches, but each has one: where
    there are fewer examples than processes, it is example 0, uncounted.
    """
    stride = rows * share.world
    full = size // stride
    batches = [range(start, start + rows) for start in range(share.rank * rows, full * stride, stride)]
    rest = range(full * stride, size)
    # Shared out evenly: the first `more` processes have one example more than the others.
    each, more = divmod(len(rest), share.world)
    begin = share.rank * each + min(share.rank, more)
    if last := rest[begin : begin + each + (share.rank < more)]:
        batches.append(last)
    if not batches:
        return [EvaluationBatch([0], [0.0])]
    return [EvaluationBatch(list(batch), [1.0] * len(batch)) for batch in batches]


def evaluation_batches(task: Task, plan: Sequence[EvaluationBatch]) -> Iterator[tuple[Batch, EvaluationBatch]]:
    """The plan's batches, collated, on the CPU, each with its place in the plan."""
    if task.evaluation is None:
        return iter(())
    collated = replace(task, collate=task.evaluation_collate or task.collate)
    return zip(load(collated, task.evaluation, [batch.indices for batch in plan]), plan, strict=True)


def evaluation_size(task: Task) -> int:
    """Examples to evaluate on; 0 for a task without evaluation."""
    return 0 if task.evaluation is None else length_of(task.evaluation, "evaluation")
