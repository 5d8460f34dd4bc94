"""What a LightningModule sees as `self.trainer`: those values of a Trainer that are known here, a clear no to others.

Made by `module`, kept up to date by `hooks` and `validation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from tpu_trainer.data import Share
from tpu_trainer.lightning.optimizers import Scheduled
from tpu_trainer.task import Hyperparameters


# Slots, so that a module which sets what nobody reads, `trainer.should_stop`, is told so.
@dataclass(slots=True)
class TrainerView:
    """Names and meanings are Lightning's. A rank is a process; the job's steps are counted, not one process's batches.

    max_epochs and num_training_batches are -1 and infinity where the training data has no length. callback_metrics
    holds the last value of everything logged, on the device in training; after an evaluation what came of it.
    """

    max_steps: int
    accumulate_grad_batches: int
    world_size: int
    global_rank: int
    local_rank: int = 0
    datamodule: Any = None
    max_epochs: int = -1
    num_training_batches: int | float = float("inf")
    current_epoch: int = 0
    global_step: int = 0
    training: bool = True
    validating: bool = False
    sanity_checking: bool = False
    optimizers: list[Any] = field(default_factory=list)
    lr_scheduler_configs: list[Scheduled] = field(default_factory=list)
    callback_metrics: dict[str, Any] = field(default_factory=dict)
    logger: None = None
    loggers: tuple[()] = ()
    callbacks: tuple[()] = ()
    progress_bar_callback: None = None
    gradient_clip_val: None = None
    gradient_clip_algorithm: None = None
    num_nodes: int = 1
    testing: bool = False
    predicting: bool = False

    @property
    def estimated_stepping_batches(self) -> int:
        return self.max_steps

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def num_devices(self) -> int:
        """With `num_nodes` 1 their product is the number of processes, which is what modules make of the two."""
        return self.world_size

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self.callback_metrics

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__slots__:
            raise AttributeError(
                f"trainer.{name} cannot be set: tpu_trainer does not read it. The training ends after the recipe's "
                "trainSteps, on all replicas alike"
                if name == "should_stop"
                else f"trainer.{name} cannot be set: tpu_trainer does not read it"
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"trainer.{name} is not provided by tpu_trainer; it provides {', '.join(offered())}")


def offered() -> list[str]:
    """The names of all that a module may read."""
    properties = [name for name, value in vars(TrainerView).items() if isinstance(value, property)]
    return sorted([*(part.name for part in fields(TrainerView)), *properties])


def view_of(hp: Hyperparameters, share: Share, datamodule: Any) -> TrainerView:
    return TrainerView(
        max_steps=hp.train_steps,
        accumulate_grad_batches=hp.accumulation_steps,
        world_size=share.world,
        global_rank=share.rank,
        local_rank=share.local_rank,
        datamodule=datamodule,
    )
