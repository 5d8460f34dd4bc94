"""Where a task joins in the loop's work: the hooks of a Task, or of a LightningModule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from tpu_trainer.task.horizon import SteppedScheduler


OFFERED = (
    *("train_begins", "epoch_begins", "step_begins", "before_update", "after_step"),
    *("evaluation_ends", "epoch_ends", "train_ends", "state", "load"),
)
"""The methods that a Task's hooks may override; the others are for LightningModules."""


class Hooks:
    """Base class of a Task's hooks, which override the methods that they need.

    Every replica calls every method at the same steps, except `state`, which is called where checkpoints are written,
    or in all replicas on device tpu. An exception in a method ends the run as an error of the user's code.
    """

    clips = False
    """Whether the task clips its gradients itself, in `before_update`."""

    @property
    def changes_gradients(self) -> bool:
        """Whether hooks may change the averaged gradients, so that their length must be measured again to clip them."""
        return type(self).before_update is not Hooks.before_update

    scheduled: tuple[SteppedScheduler, ...] = ()
    """The schedulers of the optimizer, besides the Task's `scheduler`; known once it is built."""

    def advance_scheduler(self, scheduler: Any, metric: float | None) -> None:
        """Makes a scheduler's step, with its metric if it has one."""
        scheduler.step()

    def step_made(self, step: int) -> None:
        """Called when `step` steps are made, before the schedulers' step."""

    @property
    def remarks(self) -> Sequence[str]:
        """Warnings about the evaluations so far."""
        return ()

    def fit_begins(self, optimizer: Optimizer, step: int) -> None:
        """Called when the model is on its device and `step` steps are done (0, or the checkpoint's step)."""

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Wraps an evaluation of one batch before the first step, which must leave no trace."""
        yield

    def train_begins(self) -> None:
        """Called before the first step of this process, which after a restart is not the first of the run."""

    def epoch_begins(self, epoch: int) -> None:
        """Called before the first step of `epoch`, counted from 0; after a restart, before the rest of it."""

    def step_begins(self, batch: Any, step: int) -> None:
        """Called before `step`, counted from 1; once per batch where a step has several."""

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None:
        """Called after each backward pass; after a step's last one, once the gradients are averaged."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Called when the parameters have the gradients of the global batch. The recipe's clipping comes afterwards."""

    def after_step(self, batch: Any, loss: Tensor, step: int) -> None:
        """Called after the update. The gradients are gone, and the device may still be working on the step."""

    def evaluation_ends(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation; the metrics are over all replicas. The last evaluation comes after `train_ends`
        and before the last checkpoint: weights that are changed here are saved, but not evaluated."""

    def epoch_ends(self, epoch: int) -> None:
        """Called after the last step of `epoch`, even if the training ends inside it; not when a run is asked to stop,
        because it continues there later."""

    def train_ends(self, *, stopped: bool) -> None:
        """Called after the last step. `stopped`: the run ends early, on request or by an evaluation. Changes to the
        weights are evaluated and saved, except in a run that is stopped on request, which continues later."""

    def ended_before(self) -> None:
        """Called instead of all hooks from `train_begins` to `train_ends`, in a run that continues from a checkpoint
        whose weights the hooks of the end have already changed."""

    def fit_ends(self) -> None:
        """Called when nothing more will be trained or evaluated."""

    def failed(self, error: BaseException) -> None:
        """Called when the run fails with `error`."""

    def state(self) -> Mapping[str, Any]:
        """Returns what a checkpoint must keep besides model and optimizer: JSON values and tensors in dicts and
        lists."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned, in a run that continues from a checkpoint, before its first step."""
