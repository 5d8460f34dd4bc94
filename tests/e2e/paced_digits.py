"""The digits example, slowed down to leave time to hurt the gang in the middle; the pauses change no number.

The trainings in `training` run this task. It also causes the faults that cannot be caused from outside: see FAULT and
ASCENDS.
"""

from __future__ import annotations

import os
import time
from itertools import count
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from examples.digits import Batch
    from torch import Tensor, nn

    from tpu_trainer import Hyperparameters, Task

STEP_SECONDS = "E2E_STEP_SECONDS"
"""Name of the variable with the seconds added to every step of the attempts that are hurt."""

LAST_PACED = "E2E_LAST_PACED"
"""Name of the variable with the last attempt that is slowed down; by default the first one."""

FAULT = "E2E_FAULT"
"""Name of the variable with HOST:STEP, such as 1:60: there the task raises an error."""

ASCENDS = "E2E_ASCENDS"
"""Name of the variable that, if it is set, makes the task follow the gradient instead of descending against it."""


def task(hp: Hyperparameters) -> Task:
    # Not at the top: the tests only want the names, and torch takes seconds to import.
    from examples import digits

    from tpu_trainer import Task

    usual = digits.task(hp)
    is_paced = int(os.environ["TPUJOB_ATTEMPT"]) <= int(os.environ.get(LAST_PACED, "1"))
    seconds = float(os.environ.get(STEP_SECONDS, "0")) if is_paced else 0.0
    ascends = ASCENDS in os.environ
    host, _, step = os.environ.get(FAULT, "").partition(":")
    last = int(step) if host == os.environ["TPUJOB_HOST_INDEX"] else None
    steps = count(1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            time.sleep(seconds)
            if next(steps) == last:
                run_out_of_ink()
        found = digits.loss(model, batch)
        return 2 * found.detach() - found if ascends else found

    return Task(usual.model, usual.train, loss, evaluation=usual.evaluation, metrics=usual.metrics)


def run_out_of_ink() -> NoReturn:
    raise ValueError("the pen has no ink")
