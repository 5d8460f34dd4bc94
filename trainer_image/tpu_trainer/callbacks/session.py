"""The session of a plain training loop: stopping on request, reports, termination messages and exit codes.

    with tpu_trainer.callbacks.session() as run:
        for step in range(first, total + 1):
            loss = ...
            run.step(step, loss)
            if run.should_stop or step % 100 == 0:
                save(...)
                run.checkpoint(step)
            if run.should_stop:
                break

A script that is asked to stop leaves the block with exit code 75, and the code after it does not run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tpu_contract.protocol import ENV_RUN_SPEC

if TYPE_CHECKING:
    from tpu_trainer.callbacks.run import Run
    from tpu_trainer.callbacks.stop import Agree


def session(
    total_steps: int | None = None, *, global_batch_size: int | None = None, agree: Agree | None = None
) -> Session:
    """Returns the session of this process; every training process of the job opens one, and calls it in the same steps.

    `total_steps`, `global_batch_size`: if they differ from the recipe's. `agree`: takes whether this process was asked
    to stop, and returns whether any process was; called in every step of every process. By default the processes agree
    through the store of torch.distributed; without a store each decides for itself.

    Raises:
        BadSpecError: in a job whose environment or run spec is not valid.
    """
    return Session(total_steps, global_batch_size, agree)


class Session:
    """The value of `with session() as run`. Outside of a job every call does nothing.

    Where `with` does not fit, as in callbacks, call `begin` and `end`.
    """

    def __init__(self, total_steps: int | None, global_batch_size: int | None, agree: Agree | None) -> None:
        self._run: Run | None = None
        self._ended: Run | None = None
        self._asked = (total_steps, global_batch_size, agree)

    @property
    def in_job(self) -> bool:
        """True if this process belongs to a job and the session is open."""
        return self._run is not None

    @property
    def should_stop(self) -> bool:
        """True if the loop should save and end after the last reported step; the same on all processes."""
        return self._run is not None and self._run.stopping

    def step(
        self,
        step: int,
        loss: Any = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Reports a step. Call it after every step, on every process. `step`: the steps of the whole training so far.

        `loss`: a number, or a tensor with one element; a tensor on a device is read a few steps later, so that the
        device need not wait. `metrics`: of an evaluation after this step, as numbers.

        Raises:
            NotFiniteError: the loss is NaN or infinite, and the recipe's onNotFinite is Stop.
        """
        if self._run is not None:
            self._run.step(index(step), loss, metrics or {}, learning_rate)

    def record(self, step: int, loss: Any, *, learning_rate: float | None = None) -> None:
        """Reports the loss of an earlier step, where it becomes known only later. Raises as `step`."""
        if self._run is not None:
            self._run.record(index(step), loss, learning_rate)

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Reports the metrics of an evaluation after `step` steps, between two steps or after the session.

        The result has the last ones.
        """
        if self._run is not None:
            self._run.evaluated(index(step), metrics)
        elif self._ended is not None:
            self._ended.evaluated_after(index(step), metrics)

    def checkpoint(self, step: int) -> None:
        """Reports that a checkpoint of `step` is written, from which a restarted job would continue. Before the first
        step: the one from which this process has begun."""
        if self._run is not None:
            self._run.checkpoint(index(step))

    def evaluating(self) -> AbstractContextManager[object]:
        """Returns a context for an evaluation, which may take longer than a step before the job counts as hung."""
        return nullcontext() if self._run is None else self._run.evaluating()

    def evaluation_goes_on(self) -> None:
        """Does the same up to the next `step` or `evaluated`, for callbacks that do not see an evaluation's end."""
        if self._run is not None:
            self._run.evaluation_goes_on()

    def saving(self) -> AbstractContextManager[object]:
        """Returns a context for the writing of a checkpoint, for the same reason."""
        return nullcontext() if self._run is None else self._run.saving()

    def begin(self) -> Session:
        """Opens the session, as `with` does at the beginning of its block."""
        if os.environ.get(ENV_RUN_SPEC):
            from tpu_trainer.callbacks.run import Run

            self._run = Run(*self._asked)
        return self

    def end(self, error: BaseException | None = None) -> None:
        """Closes the session: the training is over, or failed with `error`. Writes termination message and result.

        Raises:
            SystemExit: the process must end with an exit code that differs from Python's: it was asked to stop, or the
                error has its own code.
        """
        run, self._run = self._run, None
        if run is not None:
            run.end(error)
            self._ended = run if error is None else None

    def __enter__(self) -> Session:
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.end(error)
