"""Training data without a length: an iterable dataset, read in the order in which it comes.

Step j of an epoch is trained on examples jB .. (j+1)B of the stream, whatever the slice: every process goes through the
whole stream and collates only its own rows. So a stream should give cheap records, and decode them in `collate`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from tpu_trainer.data import Order, Position
from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.task import Batch, Task


def stream_batches(
    task: Task, order: Order, first_batch: int, say: Callable[[str], None]
) -> Iterator[tuple[Batch, Position]]:
    """This process's part of every step, pass by pass, on the CPU, each with the position after its whole step.

    The dataset is iterated anew for every epoch, after `set_epoch(epoch)` where it has that. It continues inside an
    epoch if it has `state_dict()` and `load_state_dict()`; otherwise that epoch is begun again, which `say` is told.

    Raises:
        UserCodeError: an epoch has no whole batch, or the dataset raised.
    """
    collate = task.collate or default_collate
    start = _continued(task.train, order.start, say)
    epoch, offset, batch = start.epoch, start.offset, first_batch
    while True:
        # All processes must go through the same stream: what shuffles it draws the same in each.
        with order.drawing(batch, alike=True), user_code("the task's dataset"):
            if hasattr(task.train, "set_epoch"):
                task.train.set_epoch(epoch)
            examples = iter(task.train)
        begun = offset
        while True:
            with order.drawing(batch, alike=True), user_code("the next examples of the task's dataset"):
                whole = list(islice(examples, order.global_batch))
            if len(whole) < order.global_batch:
                break
            with user_code("state_dict() of the task's dataset"):
                position = Position(epoch, offset := offset + order.global_batch, _state(task.train))
            for own in order.in_passes(whole[order.own_rows]):
                with order.drawing(batch), user_code("collating a batch"):
                    collated = collate(list(own))
                batch += 1
                yield collated, position
        if offset == begun == 0:
            raise UserCodeError(
                f"epoch {epoch} of the task's train dataset has {len(whole)} examples, fewer than one global batch of "
                f"{order.global_batch}; more data, a smaller slice or a smaller recipe.globalBatchSize is needed"
            )
        epoch, offset = epoch + 1, 0


def _continued(dataset: Any, start: Position, say: Callable[[str], None]) -> Position:
    """Puts the dataset where `start` is, or says that its epoch begins again."""
    if start.offset == 0:
        return start
    if start.dataset is not None and hasattr(dataset, "load_state_dict"):
        with user_code("load_state_dict() of the task's dataset"):
            dataset.load_state_dict(start.dataset)
        return start
    say(
        f"the train dataset has no state_dict(): epoch {start.epoch} begins again, and the {start.offset} examples "
        "that the run had taken of it are trained on once more"
    )
    return Position(start.epoch, 0)


def _state(dataset: Any) -> Mapping[str, Any] | None:
    """A copy of the dataset's state: the next example may change it in place."""
    if not hasattr(dataset, "state_dict"):
        return None
    state = dataset.state_dict()
    try:
        copied: Mapping[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise UserCodeError(f"state_dict() of the task's train dataset must hold JSON values only: {error}") from error
    return copied
