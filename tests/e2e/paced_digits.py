"""The digits at a pace, so that there is time to hurt the gang in the middle; the pauses change no number.

The task of the jobs of `training`. It also commits the faults that no one outside can: see FAULT.
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
"""Name of the variable with the seconds that every step lasts longer."""

FAULT = "E2E_FAULT"
"""Name of the variable with HOST:STEP:KIND, such as 1:60:raise: what that host does there in the first attempt."""


def task(hp: Hyperparameters) -> Task:
    # Not above: the tests want the names only, and torch takes seconds to import.
    from examples import digits

    from tpu_trainer import Task

    usual = digits.task(hp)
    seconds = float(os.environ.get(STEP_SECONDS, "0"))
    host, step, kind = os.environ.get(FAULT, "-1:0:").split(":")
    mine = os.environ["TPUJOB_HOST_INDEX"] == host and os.environ["TPUJOB_ATTEMPT"] == "1"
    steps = count(1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            time.sleep(seconds)
            if next(steps) == int(step) and mine:
                {"raise": run_out_of_ink, "hoard": hoard}[kind]()
        return digits.loss(model, batch)

    return Task(usual.model, usual.train, loss, evaluation=usual.evaluation, metrics=usual.metrics)


def run_out_of_ink() -> NoReturn:
    raise ValueError("the pen has no ink")


def hoard() -> NoReturn:
    """Takes memory until the kernel ends it."""
    taken = []
    while True:
        # Not zeros, which take no memory until they are written.
        taken.append(b"x" * 2**26)
