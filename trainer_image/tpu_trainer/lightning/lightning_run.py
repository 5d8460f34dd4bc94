"""How an entrypoint asks for Lightning's own Trainer, and the error of a module that needs it and did not ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpu_trainer.contract.errors import UserCodeError

if TYPE_CHECKING:
    from torch import nn

ADVICE = (
    "Lightning's own Trainer supports all that Lightning has: set spec.trainer.loop: Lightning in the job, or return "
    "tpu_trainer.LightningRun(module, data) from the entrypoint. A step then takes some 2 ms more, a run that resumes "
    "with another global batch restarts its epoch, and recipe.emaDecay, stopEarly, sharding, onNotFinite: Skip, "
    "schedule Plateau, checkpoint.keepBest and initFrom are refused (docs/lightning.md)"
)


def only_under_lightning(what: str) -> UserCodeError:
    """Returns the error of a module that uses `what`, which names the line that changes the loop."""
    return UserCodeError(f"{what}: the trainer's own loop does not support this. {ADVICE}")


def missing_loss_error() -> UserCodeError:
    """Returns the error of a training_step that returned None, in either loop."""
    return UserCodeError(
        "training_step returns None; return the loss in every step. recipe.onNotFinite: Skip leaves out a step that is "
        "not finite, in all processes alike. With spec.trainer.loop: Lightning a run of one process, but not of "
        "several, may skip a batch like that"
    )


def skipped_epoch_error() -> UserCodeError:
    """Returns the error of an on_train_batch_start that returned -1, in either loop."""
    return UserCodeError(
        "on_train_batch_start returns -1, which ends the epoch: the trainer does not support this, because an epoch "
        "follows from the data. Let the dataset have fewer examples, or return None"
    )


class LightningRun:
    """The result of an entrypoint whose module Lightning's own Trainer shall train.

    `module` is a LightningModule, `data` a LightningDataModule or None. `options` are the Trainer's own (callbacks,
    logger, precision, gradient_clip_val), except for those that follow from the recipe and the slice.
    """

    def __init__(self, module: nn.Module, data: Any = None, **options: Any) -> None:
        self.module, self.data, self.options = module, data, options
