"""Do all processes see data of the same length? Called once by `replica`, before the first step.

The trainer cuts each process's shard out of an order of the whole dataset. Where a task has sharded the data already,
some examples would be left out and others seen twice, without any other sign.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpu_trainer.backends.base import Backend
from tpu_trainer.data import has_length, length_of
from tpu_trainer.doctor.agreement import ranges
from tpu_trainer.errors import UserCodeError
from tpu_trainer.evaluation_plan import evaluation_size
from tpu_trainer.task import Task

_HALF = 2**24
"""float32, which a gather carries, holds all whole numbers up to here."""

_MOST_NAMED = 4


def check_lengths(task: Task, backend: Backend, host: int) -> None:
    """A collective. `host`: this process's host.

    Raises:
        UserCodeError: in every process, when the lengths of their training or evaluation data are not equal.
    """
    if backend.world == 1:
        return
    # An iterable dataset is as long as its stream.
    training = length_of(task.train, "train") if has_length(task.train) else 0
    sizes = [training, evaluation_size(task)]
    rows = backend.gather([host, *(part for size in sizes for part in divmod(size, _HALF))])
    for place, kind in enumerate(("training", "evaluation")):
        high, low = 1 + 2 * place, 2 + 2 * place
        text = unequal_lengths(kind, [(int(row[0]), int(row[high]) * _HALF + int(row[low])) for row in rows])
        if text is not None:
            raise UserCodeError(text)


def unequal_lengths(kind: str, rows: Sequence[tuple[int, int]]) -> str | None:
    """What to say of the processes' lengths, None where all are equal. `rows`: each process's host and length."""
    hosts: dict[int, set[int]] = {}
    for host, length in rows:
        hosts.setdefault(length, set()).add(host)
    if len(hosts) == 1:
        return None
    said: list[str] = []
    for length, group in list(hosts.items())[:_MOST_NAMED]:
        who = f"host{'s' if len(group) > 1 else ''} {ranges(sorted(group))}"
        said.append(f"{who} {'have' if len(group) > 1 else 'has'} {length}{'' if said else f' {kind} examples'}")
    more = "; and so on" if len(hosts) > _MOST_NAMED else ""
    return f"{', '.join(said)}{more}: every process must see the whole dataset; the trainer shards it"
