"""The digits example, slowed down to leave time to hurt the gang in the middle; the pauses change no number.

The trainings in `training` run this task. It also causes the fault that cannot be caused from outside: see FAULT.
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
"""Name of the variable with the seconds added to every step of the first attempt, the one that is hurt."""

FAULT = "E2E_FAULT"
"""Name of the variable with HOST:STEP, such as 1:60: there the task raises an error."""


def task(hp: Hyperparameters) -> Task:
    # Not at the top: the tests only want the names, and torch takes seconds to import.
    from examples import digits

    from tpu_trainer import Task

    usual = digits.task(hp)
    seconds = float(os.environ.get(STEP_SECONDS, "0")) if os.environ["TPUJOB_ATTEMPT"] == "1" else 0.0
    host, _, step = os.environ.get(FAULT, "").partition(":")
    last = int(step) if host == os.environ["TPUJOB_HOST_INDEX"] else None
    steps = count(1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            time.sleep(seconds)
            if next(steps) == last:
                run_out_of_ink()
        return digits.loss(model, batch)

    return Task(usual.model, usual.train, loss, evaluation=usual.evaluation, metrics=usual.metrics)


def run_out_of_ink() -> NoReturn:
    raise ValueError("the pen has no ink")
