"""A callback for Lightning's own Trainer: Trainer(..., callbacks=[TPUJobCallback()]).

When the job is asked to stop, the callback saves `last-stopped.ckpt` beside the newest checkpoint and the process exits
with code 75, so nothing after `fit` runs. `trainer.fit(..., ckpt_path="last")` continues from it.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tpu_trainer.callbacks.session import Session, session

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

STOPPED = "last-stopped.ckpt"

# Two packages with the same content; a program that has imported one of them uses that one.
_USES_LIGHTNING = "lightning.pytorch" in sys.modules or find_spec("pytorch_lightning") is None
_package = import_module("lightning.pytorch" if _USES_LIGHTNING else "pytorch_lightning")


class TPUJobCallback(_package.Callback):  # type: ignore[misc, name-defined]
    """Reports a fit to its job, and stops it on request. Outside of a job it does nothing."""

    def __init__(self) -> None:
        self._run: Session = session()
        self._step = 0
        self._saved: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not before: by now Lightning has installed its handler of SIGTERM, which runs a collective on only those
        # processes that got the signal.
        steps, rows = trainer.estimated_stepping_batches, getattr(trainer.train_dataloader, "batch_size", None)
        self._run = session(
            int(steps) if steps != float("inf") else None,
            global_batch_size=rows and rows * trainer.world_size * trainer.accumulate_grad_batches,
        ).begin()
        self._step = trainer.global_step
        if self._step:
            self._run.checkpoint(self._step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._report_saved()
        if trainer.global_step == self._step:
            return  # A pass whose gradients are accumulated.
        self._step = trainer.global_step
        self._run.step(self._step, outputs["loss"] if isinstance(outputs, dict) else outputs)
        if self._run.should_stop:
            self._stop(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.evaluation_goes_on()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._run.evaluated(trainer.global_step, trainer.callback_metrics)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.evaluated(trainer.global_step, trainer.callback_metrics)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # The checkpoint is being put together; it is written by the next hook.
        self._saved = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report_saved()
        self._run.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._run.end(exception)

    def _stop(self, trainer: Trainer) -> None:
        """Ends the fit after this batch, without the epochs and the validation that would follow."""
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        with self._run.saving():
            trainer.save_checkpoint(os.path.join(folder, STOPPED))
        self._report_saved()
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
        trainer.limit_val_batches = 0

    def _report_saved(self) -> None:
        if self._saved is not None:
            self._run.checkpoint(self._saved)
            self._saved = None
