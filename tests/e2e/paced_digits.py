"""The digits example, slowed down to leave time to hurt the gang in the middle; the pauses change no number.

The jobs in `training` run this task. It also causes the faults that cannot be caused from outside: see FAULT.
"""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from examples.digits import Batch
    from torch import Tensor, nn

    from tpu_trainer import Hyperparameters, Task

STEP_SECONDS = "E2E_STEP_SECONDS"
"""Name of the variable with the seconds added to every step in the paced attempts."""

PACED_ATTEMPTS = "E2E_PACED_ATTEMPTS"
"""Name of the variable with the number of paced attempts, from the first on; by default 1, the one that is hurt."""

GATE = "E2E_GATE"
"""Name of the variable with the step of each attempt at which the first host waits until OPEN exists."""

OPEN = Path("/tmp/open")

FAULT = "E2E_FAULT"
"""Name of the variable with HOST:STEP:KIND, such as 1:60:raise: what that host does there in the first attempt."""


def task(hp: Hyperparameters) -> Task:
    # Not at the top: the tests only want the names, and torch takes seconds to import.
    from examples import digits

    from tpu_trainer import Task

    usual = digits.task(hp)
    attempt = int(os.environ["TPUJOB_ATTEMPT"])
    paced = attempt <= int(os.environ.get(PACED_ATTEMPTS, "1"))
    seconds = float(os.environ.get(STEP_SECONDS, "0")) if paced else 0.0
    gate = int(os.environ.get(GATE, "0")) if os.environ["TPUJOB_HOST_INDEX"] == "0" else 0
    host, step, kind = os.environ.get(FAULT, "-1:0:").split(":")
    mine = os.environ["TPUJOB_HOST_INDEX"] == host and attempt == 1
    steps = count(1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            done = next(steps)
            time.sleep(seconds)
            while done == gate and not OPEN.exists():
                time.sleep(0.1)
            if done == int(step) and mine:
                {"raise": run_out_of_ink, "hoard": hoard}[kind]()
        return digits.loss(model, batch)

    return Task(usual.model, usual.train, loss, evaluation=usual.evaluation, metrics=usual.metrics)


def run_out_of_ink() -> NoReturn:
    raise ValueError("the pen has no ink")


def hoard() -> NoReturn:
    """Allocates memory until the kernel kills the process."""
    taken = []
    while True:
        # Zeros would take no memory until they are written.
        taken.append(b"x" * 2**26)
