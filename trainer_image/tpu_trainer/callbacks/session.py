"""The session of a plain training loop: stopping on request, reports, last words and exit codes.

    with tpu_trainer.callbacks.session() as run:
        for step in range(first, total + 1):
            loss = ...
            run.step(step, loss)
            if run.should_stop or step % 100 == 0:
                save(...)
                run.checkpoint(step)
            if run.should_stop:
                break

A script that was told to stop leaves the block with exit code 75, and the code after it does not run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tpu_trainer.contract.protocol import ENV_RUN_SPEC

if TYPE_CHECKING:
    from tpu_trainer.callbacks.run import Run
    from tpu_trainer.callbacks.stop import Agree


def session(
    total_steps: int | None = None, *, global_batch_size: int | None = None, agree: Agree | None = None
) -> Session:
    """The session of this process; every training process of the job opens one, and calls it in the same steps.

    `total_steps`, `global_batch_size`: if they differ from the recipe's. `agree`: takes whether this process was told
    to stop, and returns whether any process was; called in every step of every process. By default the processes agree
    through the store of torch.distributed; without one each decides for itself.

    Raises:
        BadSpecError: in a job whose environment or run spec is not valid.
    """
    return Session(total_steps, global_batch_size, agree)


class Session:
    """What `with session() as run` gives. Outside of a job every call does nothing.

    Where `with` does not fit, as in callbacks, call `begin` and `end`.
    """

    def __init__(self, total_steps: int | None, global_batch_size: int | None, agree: Agree | None) -> None:
        self._run: Run | None = None
        self._ended: Run | None = None
        self._asked = (total_steps, global_batch_size, agree)

    @property
    def in_job(self) -> bool:
        """Whether this process belongs to a job, and the session is open."""
        return self._run is not None

    @property
    def should_stop(self) -> bool:
        """Whether to save and leave the loop after the step that was told last; the same on all processes."""
        return self._run is not None and self._run.stopping

    def step(
        self,
        step: int,
        loss: Any = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Call it after every step, on every process. `step`: how many steps the whole training has made.

        `loss`: a number, or a tensor with one element; a tensor on a device is read a few steps later, so that the
        device need not wait. `metrics`: of an evaluation after this step, as numbers.

        Raises:
            NotFiniteError: the loss is NaN or infinite, and the recipe's onNotFinite is Stop.
        """
        if self._run is not None:
            self._run.step(index(step), loss, metrics or {}, learning_rate)

    def record(self, step: int, loss: Any, *, learning_rate: float | None = None) -> None:
        """The loss of a step that has been told, for those who learn it later. Raises as `step`."""
        if self._run is not None:
            self._run.record(index(step), loss, learning_rate)

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The metrics of an evaluation after `step` steps, for those who have them between two steps, or after the
        session: the result has the last ones."""
        if self._run is not None:
            self._run.evaluated(index(step), metrics)
        elif self._ended is not None:
            self._ended.evaluated_after(index(step), metrics)

    def checkpoint(self, step: int) -> None:
        """A checkpoint of `step` is written, and a restarted job would continue from it. Before the first step: the
        one that this process has begun from."""
        if self._run is not None:
            self._run.checkpoint(index(step))

    def evaluating(self) -> AbstractContextManager[object]:
        """Around an evaluation, which may take longer than a step before the job counts as hung."""
        return nullcontext() if self._run is None else self._run.evaluating()

    def evaluation_goes_on(self) -> None:
        """As `evaluating`, up to the next `step` or `evaluated`, for callbacks that are not told of its end."""
        if self._run is not None:
            self._run.evaluation_goes_on()

    def saving(self) -> AbstractContextManager[object]:
        """Around the writing of a checkpoint, for the same reason."""
        return nullcontext() if self._run is None else self._run.saving()

    def begin(self) -> Session:
        """What `with` does at the beginning of its block."""
        if os.environ.get(ENV_RUN_SPEC):
            from tpu_trainer.callbacks.run import Run

            self._run = Run(*self._asked)
        return self

    def end(self, error: BaseException | None = None) -> None:
        """The training is over, or failed with `error`. Leaves the last words and the result.

        Raises:
            SystemExit: the process must end with another exit code than it would by itself: it was told to stop, or
                the error has a code of its own.
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
