"""Why a LightningModule needs Lightning's own Trainer.

The trainer's own loop is faster and resumes on any slice, but it does less than Lightning's Trainer. A module that
needs more is trained by Lightning's Trainer, and the run reports why. A need that shows only in a step is an error
that names the way out, since other replicas may not have met it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpu_trainer.contract.errors import UserCodeError

if TYPE_CHECKING:
    from torch import nn

ADVICE = "return tpu_trainer.LightningRun(module, data) from the entrypoint to train with Lightning's own Trainer"


class NeedsTrainerError(UserCodeError):
    """The module needs something that only Lightning's own Trainer does.

    `why`: what it needs; None if the entrypoint itself asks for that Trainer.
    """

    def __init__(self, why: str | None) -> None:
        super().__init__(why or "the entrypoint returns a LightningRun")
        self.why = why

    def in_training(self) -> UserCodeError:
        """Returns the error of a step, where it is too late to change the Trainer."""
        return UserCodeError(f"{self}. Lightning's Trainer can do it: {ADVICE}")


def missing_loss_error(processes: int) -> UserCodeError:
    """Returns the error of a training_step that returned None; Lightning's Trainer allows it with one process."""
    if processes == 1:
        return NeedsTrainerError("training_step returns None, which skips the batch")
    return UserCodeError(f"training_step returns None. {advise_on_skipping(processes)}")


def advise_on_skipping(processes: int) -> str:
    """Returns why one process of several cannot skip a step, and what to do instead."""
    return (
        f"One of {processes} processes cannot skip a step alone; under Lightning's Trainer the run ends there, too. "
        "Always return the loss: in the trainer's own loop recipe.onNotFinite: Skip leaves out a step that is not "
        "finite, in all processes alike"
    )


class LightningRun:
    """The result of an entrypoint whose module Lightning's own Trainer shall train.

    `module` is a LightningModule, `data` a LightningDataModule or None. `options` are the Trainer's own (callbacks,
    logger, precision, gradient_clip_val), except for those that follow from the recipe and the slice.
    """

    def __init__(self, module: nn.Module, data: Any = None, **options: Any) -> None:
        self.module, self.data, self.options = module, data, options
