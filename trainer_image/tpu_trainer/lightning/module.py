"""Makes a Task and Hooks of a LightningModule, and takes its data.

Everything that can be refused before the first step is refused here, or when the optimizer is built. A dataloader says
which dataset, how examples become a batch, and how many processes read. The order and size of batches are the
trainer's: they follow from the recipe, and the trajectory must not depend on the slice.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data.loading import Share, has_length, refuse_own_iterator
from tpu_trainer.lightning.choice import reason_in_code
from tpu_trainer.lightning.hooks import LightningHooks
from tpu_trainer.lightning.needs import NeedsTrainerError
from tpu_trainer.lightning.session import Log, Session, overridden, takes_index, view_of
from tpu_trainer.lightning.validation import Validation, metrics_of, without_own_collectives
from tpu_trainer.task.task import Hyperparameters, Task

if TYPE_CHECKING:
    from torch.optim import Optimizer

_REPLACED = (SequentialSampler, RandomSampler, DistributedSampler)

_ONLY_TRAINER = ("backward", "configure_callbacks", "configure_sharded_model")
"""Hooks that the trainer's own loop does not call."""


def is_lightning(made: object) -> bool:
    """Any torch module with a training step and an optimizer of its own counts as a LightningModule."""
    return isinstance(made, nn.Module) and all(
        callable(getattr(made, name, None)) for name in ("training_step", "configure_optimizers")
    )


def adopt(module: nn.Module, data: Any, hp: Hyperparameters, share: Share) -> tuple[Task, LightningHooks]:
    """The task that trains `module` on the data of `data`, a LightningDataModule, or on the module's own if None.

    Raises:
        UserCodeError: the module has no data, or raised.
        NeedsTrainerError: it needs Lightning's own Trainer.
    """
    _refuse(module, data)
    view = view_of(hp, share, data)
    session = Session(module, data, view, Log(view.callback_metrics))
    _attach(session)
    prepare(session)
    session.call("configure_model")
    without_own_collectives(metrics_of(module))
    training, held_out = training_source(session), validation_source(session)
    if share.rank == 0 and (note := note_batch_size(training, hp)):
        print(f"note: {note}", file=sys.stderr, flush=True)
    if has_length(training.dataset):
        size = len(training.dataset if training.sampler is None else training.sampler)  # type: ignore[arg-type]
        steps = size // hp.global_batch_size
        view.num_training_batches = steps * hp.accumulation_steps
        # At least 1: a dataset shorter than one batch is refused later, where its batches are made.
        view.max_epochs = -(-hp.train_steps // max(steps, 1))
    hooks = LightningHooks(session, hp)
    task = Task(
        model=module,
        train=training.dataset,
        loss=hooks.loss,
        optimizer=hooks.configure,
        collate=training.collate,
        workers=training.workers,
        order=None if training.sampler is None else SamplerOrder(training.sampler),
        evaluation=held_out.dataset if held_out else None,
        evaluation_collate=held_out.collate if held_out else None,
        evaluation_workers=held_out.workers if held_out else None,
        worker_init=training.init,
        evaluation_worker_init=held_out.init if held_out else None,
        evaluator=Validation(session) if held_out else None,
    )
    return task, hooks


def _refuse(module: nn.Module, data: Any) -> None:
    for name in ("training_step", "configure_optimizers"):
        if not overridden(module, name):
            raise UserCodeError(f"{type(module).__name__} has no {name}()")
    if not getattr(module, "automatic_optimization", True):
        raise NeedsTrainerError(f"{type(module).__name__}: automatic_optimization is False")
    for name in _ONLY_TRAINER:
        if overridden(module, name):
            raise NeedsTrainerError(f"{type(module).__name__} overrides {name}()")
    if (reason := reason_in_code(module)) is not None:
        raise NeedsTrainerError(reason)
    for name in ("training_step", "validation_step"):
        if overridden(module, name):
            takes_index(getattr(module, name))
    if data is not None and not callable(getattr(data, "train_dataloader", None)):
        raise UserCodeError(
            f"the second of the pair is a {type(data).__name__}; it must be a LightningDataModule, which has "
            "train_dataloader()"
        )


def _attach(session: Session) -> None:
    """Answers what the module asks its Trainer for: from the view, this trainer's log and its one optimizer."""
    module, view = session.module, session.view
    if session.data is not None:
        session.data.trainer = view
    # Set on the object, so that they hide Lightning's own methods, which call a real Trainer.
    answers: dict[str, Any] = {
        "trainer": view,
        "log": session.log.log,
        "log_dict": session.log.log_dict,
        "optimizers": lambda use_pl_optimizer=True: view.optimizers[0],
        "lr_schedulers": lambda: _one_or_all([each.scheduler for each in view.lr_scheduler_configs]),
        "clip_gradients": _clip_gradients,
    }
    for name, answer in answers.items():
        setattr(module, name, answer)


def release(module: nn.Module) -> None:
    """Takes off the answers that `adopt` has set on the module, for another Trainer, which sets itself."""
    for name in ("log", "log_dict", "optimizers", "lr_schedulers", "clip_gradients"):
        vars(module).pop(name, None)


def _one_or_all(schedulers: list[Any]) -> Any:
    if not schedulers:
        return None
    return schedulers[0] if len(schedulers) == 1 else schedulers


def _clip_gradients(
    optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
) -> None:
    """`clip_gradients` of a LightningModule, for its configure_gradient_clipping: by "norm" or by "value"."""
    if not gradient_clip_val:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if gradient_clip_algorithm in (None, "norm"):
        nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
    elif gradient_clip_algorithm == "value":
        nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    else:
        raise UserCodeError(f'clip_gradients: the algorithm must be "norm" or "value", got {gradient_clip_algorithm!r}')


@dataclass(frozen=True)
class Source:
    """What is used of a dataloader. `batch_size`: examples per process and batch, as the loader had it. `sampler`: one
    that chooses anything else than every example once. `init`: called in each of the workers."""

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    workers: int
    init: Callable[[int], object] | None
    batch_size: int
    sampler: Sampler[Any] | None


@dataclass(frozen=True)
class SamplerOrder:
    """A sampler as a task's `order`: every process draws all of an epoch's indices, with generators that depend on seed
    and epoch only. So a resumed run draws them again."""

    sampler: Sampler[Any]

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __call__(self, epoch: int, seed: int, size: int) -> list[int]:
        # One that was given to it has a state, which no checkpoint keeps.
        own = getattr(self.sampler, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(int(torch.randint(2**63 - 1, ())))
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)
        # As many as it says: it may go on forever.
        return list(islice(self.sampler, len(self.sampler)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Collate:
    """`on_before_batch_transfer` after collating; a class, so that it can be sent to the processes that read data."""

    collate: Callable[[list[Any]], Any]
    before_transfer: Callable[[Any, int], Any]

    def __call__(self, examples: list[Any]) -> Any:
        return self.before_transfer(self.collate(examples), 0)


def prepare(session: Session) -> None:
    """Calls `prepare_data` and `setup`. Processes of one host prepare in turn: the second finds what the first fetched.

    Every host prepares, since hosts share no disk.
    """
    if session.of_data("prepare_data") is not None:
        with _one_at_a_time():
            session.call_both("prepare_data")
    session.call_both("setup", "fit")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    # A lock on the directory itself leaves no file behind, and ends with the process that holds it.
    directory = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def training_source(session: Session) -> Source:
    """Raises UserCodeError if there is no such dataloader, NeedsTrainerError if it cannot be replaced."""
    loader = _loader(session, "train_dataloader")
    if loader is None:
        raise UserCodeError(
            "neither the LightningModule nor a LightningDataModule has a train_dataloader(); return the pair "
            "(LightningModule, LightningDataModule) if the data is separate"
        )
    return _source(session, loader, "train_dataloader", trains=True)


def validation_source(session: Session) -> Source | None:
    """None if there is nothing to validate. Raises NeedsTrainerError as `training_source` does."""
    if not session.has("validation_step"):
        return None
    loader = _loader(session, "val_dataloader")
    if loader is None:
        return None
    source = _source(session, loader, "val_dataloader", trains=False)
    if isinstance(source.dataset, IterableDataset):
        raise NeedsTrainerError("val_dataloader: its dataset is iterable")
    return source


def note_batch_size(source: Source, hp: Hyperparameters) -> str | None:
    """What to say if the loader's batch size differs from the recipe's."""
    if source.batch_size == hp.per_replica_batch_size:
        return None
    return (
        f"train_dataloader: batch_size {source.batch_size} is not used; by the recipe a step has "
        f"{hp.global_batch_size} examples, {hp.per_replica_batch_size} per replica"
    )


def _loader(session: Session, name: str) -> DataLoader[Any] | None:
    method = session.of_data(name)
    if method is None:
        return None
    with user_code(name):
        given = method()
    if isinstance(given, Sequence) and len(given) <= 1:
        given = given[0] if given else None
    if given is None or isinstance(given, DataLoader):
        return given
    many = f" of {len(given)}" if isinstance(given, Sequence) else ""
    raise NeedsTrainerError(f"{name}: it returns a {type(given).__name__}{many}, not one torch.utils.data.DataLoader")


def _source(session: Session, loader: DataLoader[Any], name: str, *, trains: bool) -> Source:
    refuse_own_iterator(loader, name)
    if loader.batch_size is None and loader.batch_sampler is None:
        raise NeedsTrainerError(f"{name}: batch_size is None, so the dataset makes the batches")
    sampler = None if isinstance(loader.dataset, IterableDataset) else _sampler(loader, name)
    if sampler is not None and not trains:
        raise NeedsTrainerError(f"{name}: sampler {type(sampler).__name__}")
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    if (before := session.of_data("on_before_batch_transfer")) is not None:
        collate = Collate(collate, before)
    # A loader that was given torch's own BatchSampler has no batch size itself.
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", 1)
    return Source(loader.dataset, collate, loader.num_workers, loader.worker_init_fn, size, sampler)


def _sampler(loader: DataLoader[Any], name: str) -> Sampler[Any] | None:
    """None for one that means "all examples, each once", which the trainer's own order replaces.

    Raises:
        NeedsTrainerError: it makes batches, or does not say how many examples an epoch has.
    """
    if type(loader.batch_sampler) is not BatchSampler:
        raise NeedsTrainerError(f"{name}: batch_sampler {type(loader.batch_sampler).__name__}")
    # The loader's own attribute is only a default if a BatchSampler was given.
    sampler = cast("Sampler[Any]", loader.batch_sampler.sampler)
    if type(sampler) is RandomSampler:
        chooses = sampler.replacement or sampler.num_samples != len(sampler.data_source)
        return sampler if chooses else None
    if type(sampler) in _REPLACED:
        return None
    if not hasattr(sampler, "__len__"):
        raise NeedsTrainerError(f"{name}: sampler {type(sampler).__name__} without __len__()")
    return sampler
