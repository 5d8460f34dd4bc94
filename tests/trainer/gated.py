"""A task that stands still where a test wants to look at it: in a call of the loss, or in the evaluation.

At each place of TEST_GATES it waits in the kernel, out of Python's reach, until the test opens the gate: a named pipe.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.trainer import tasks
from tpu_trainer import Hyperparameters, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

GATES = "TEST_GATES"
"""A directory with pipes named after the calls of the loss at which host 0 waits (counted from 1), or `evaluation`."""


class Gates:
    """The test's side; `environment` is for the worker."""

    def __init__(self, directory: Path, *places: int | str) -> None:
        directory.mkdir()
        self.environment = {GATES: str(directory)}
        self._pipes: dict[int | str, int] = {}
        for place in places:
            os.mkfifo(directory / str(place))
            # Held at both ends, so that neither side waits for the other to come.
            self._pipes[place] = os.open(directory / str(place), os.O_RDWR)

    def open(self, place: int | str) -> None:
        """Lets the worker that waits there continue, or one that arrives later pass."""
        os.write(self._pipes[place], b"!")

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)


def _wait(place: int | str) -> None:
    gate = Path(os.environ[GATES]) / str(place)
    if os.environ["TPUJOB_HOST_INDEX"] == "0" and gate.exists():
        with gate.open("rb", buffering=0) as pipe:
            pipe.read(1)
        gate.unlink()


def task(hp: Hyperparameters, failing: int | None = None) -> Task:
    """`failing`: the call of the loss that raises, once its gate is open."""
    calls = 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        _wait(calls)
        if calls == failing:
            raise ValueError("the labels are broken")
        return tasks.loss(model, batch)

    def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        # Not in the trial evaluation, before the first step.
        if calls:
            _wait("evaluation")
        features, labels = batch
        return {"accuracy": (model(features).argmax(1) == labels).float()}

    examples = tasks.examples()
    return Task(model=tasks.Network(), train=examples, loss=loss, evaluation=examples, metrics=metrics)


def failing_at_14(hp: Hyperparameters) -> Task:
    return task(hp, failing=14)
