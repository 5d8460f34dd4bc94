"""How a LightningModule comes to be trained by Lightning's own Trainer.

The trainer's own loop is faster and continues on any slice, but it does not do all that Lightning's Trainer does. A
module that needs more is trained by Lightning's Trainer instead, and the run says why. What can be known before the
first step is a reason to change over; what shows up only in a step is an error that names the way out, since other
replicas may not have come to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpu_trainer.contract.errors import UserCodeError

if TYPE_CHECKING:
    from torch import nn

ADVICE = "return tpu_trainer.LightningRun(module, data) from the entrypoint to train with Lightning's own Trainer"


class NeedsTrainerError(UserCodeError):
    """The module asks for something that only Lightning's own Trainer does; the text says for what.

    `why`: the text; None if the entrypoint itself asks for that Trainer.
    """

    def __init__(self, why: str | None) -> None:
        super().__init__(why or "the entrypoint returns a LightningRun")
        self.why = why

    def in_training(self) -> UserCodeError:
        """The same, found in a step, when it is too late to change over."""
        return UserCodeError(f"{self}. Lightning's Trainer can do it: {ADVICE}")


def without_loss(processes: int) -> UserCodeError:
    """Returns the error of a training_step that has returned None: Lightning's Trainer skips the batch where there is
    one process."""
    if processes == 1:
        return NeedsTrainerError("training_step returns None, which skips the batch")
    return UserCodeError(f"training_step returns None. {only_alone(processes)}")


def only_alone(processes: int) -> str:
    return (
        f"A step of {processes} processes cannot be skipped by one of them, and Lightning's Trainer ends there, too. "
        "Return the loss in every case: in the trainer's own loop recipe.onNotFinite: Skip leaves out a step that is "
        "not finite, in all processes alike"
    )


class LightningRun:
    """What an entrypoint returns to have its module trained by Lightning's own Trainer.

    `module` is a LightningModule, `data` a LightningDataModule or None. `options` are the Trainer's own (callbacks,
    logger, precision, gradient_clip_val), except for those that follow from the recipe and the slice.
    """

    def __init__(self, module: nn.Module, data: Any = None, **options: Any) -> None:
        self.module, self.data, self.options = module, data, options
