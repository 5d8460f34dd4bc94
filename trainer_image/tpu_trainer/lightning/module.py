"""Makes a Task and Hooks from a LightningModule and its dataloaders.

What the trainer's own loop cannot do is refused here, or when the optimizer is built. A dataloader determines the
dataset, the collate function and the number of workers. The order and size of batches follow from the recipe, so that
the trajectory does not depend on the slice.
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
from tpu_trainer.lightning.session import ModuleLog, ModuleSession, overrides, takes_index, trainer_view
from tpu_trainer.lightning.validation import Validation, disable_own_collectives, metrics_of
from tpu_trainer.task.task import Hyperparameters, Task

if TYPE_CHECKING:
    from torch.optim import Optimizer

_REPLACED = (SequentialSampler, RandomSampler, DistributedSampler)

_ONLY_TRAINER = ("backward", "configure_callbacks", "configure_sharded_model")
"""Hooks that the trainer's own loop does not call."""


def is_lightning(made: object) -> bool:
    """Returns whether `made` is a torch module with training_step and configure_optimizers."""
    return isinstance(made, nn.Module) and all(
        callable(getattr(made, name, None)) for name in ("training_step", "configure_optimizers")
    )


def adopt(module: nn.Module, data: Any, hp: Hyperparameters, share: Share) -> tuple[Task, LightningHooks]:
    """Returns the task that trains `module` on `data`, a LightningDataModule, or on the module's own data if None.

    Raises:
        UserCodeError: the module has no data, or its code raised.
        NeedsTrainerError: the module needs Lightning's own Trainer.
    """
    _refuse(module, data)
    view = trainer_view(hp, share, data)
    session = ModuleSession(module, data, view, ModuleLog(view.callback_metrics))
    _attach(session)
    prepare(session)
    session.call("configure_model")
    disable_own_collectives(metrics_of(module))
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
        if not overrides(module, name):
            raise UserCodeError(f"{type(module).__name__} has no {name}()")
    if not getattr(module, "automatic_optimization", True):
        raise NeedsTrainerError(f"{type(module).__name__}: automatic_optimization is False")
    for name in _ONLY_TRAINER:
        if overrides(module, name):
            raise NeedsTrainerError(f"{type(module).__name__} overrides {name}()")
    if (reason := reason_in_code(module)) is not None:
        raise NeedsTrainerError(reason)
    for name in ("training_step", "validation_step"):
        if overrides(module, name):
            takes_index(getattr(module, name))
    if data is not None and not callable(getattr(data, "train_dataloader", None)):
        raise UserCodeError(
            f"the second of the pair is a {type(data).__name__}; it must be a LightningDataModule, which has "
            "train_dataloader()"
        )


def _attach(session: ModuleSession) -> None:
    """Sets on the module what it would get from a Trainer: the view, the log and the one optimizer."""
    module, view = session.module, session.view
    if session.data is not None:
        session.data.trainer = view
    # Attributes of the object shadow Lightning's own methods, which call a real Trainer.
    attributes: dict[str, Any] = {
        "trainer": view,
        "log": session.log.log,
        "log_dict": session.log.log_dict,
        "optimizers": lambda use_pl_optimizer=True: view.optimizers[0],
        "lr_schedulers": lambda: _one_or_all([config.scheduler for config in view.lr_scheduler_configs]),
        "clip_gradients": _clip_gradients,
    }
    for name, value in attributes.items():
        setattr(module, name, value)


def detach(module: nn.Module) -> None:
    """Removes what `adopt` has set on the module, before Lightning's Trainer attaches itself."""
    for name in ("log", "log_dict", "optimizers", "lr_schedulers", "clip_gradients"):
        vars(module).pop(name, None)


def _one_or_all(schedulers: list[Any]) -> Any:
    if not schedulers:
        return None
    return schedulers[0] if len(schedulers) == 1 else schedulers


def _clip_gradients(
    optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
) -> None:
    """Clips by "norm" or by "value": `clip_gradients` for a module's configure_gradient_clipping."""
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
    """The parts of a dataloader that are used. `batch_size`: the loader's own. `sampler`: None for every example once.
    `init`: called in each worker."""

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    workers: int
    init: Callable[[int], object] | None
    batch_size: int
    sampler: Sampler[Any] | None


@dataclass(frozen=True)
class SamplerOrder:
    """A sampler as a task's `order`. Every process draws all indices of an epoch, with generators that depend only on
    the seed and the epoch, so that a resumed run draws the same."""

    sampler: Sampler[Any]

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __call__(self, epoch: int, seed: int, size: int) -> list[int]:
        # No checkpoint keeps the state of a generator that the user gave to the sampler.
        generator = getattr(self.sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(int(torch.randint(2**63 - 1, ())))
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)
        # No more than its length: it may be endless.
        return list(islice(self.sampler, len(self.sampler)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Collate:
    """Collates, then calls `on_before_batch_transfer`. A class, because the workers of a loader must unpickle it."""

    collate: Callable[[list[Any]], Any]
    before_transfer: Callable[[Any, int], Any]

    def __call__(self, examples: list[Any]) -> Any:
        return self.before_transfer(self.collate(examples), 0)


def prepare(session: ModuleSession) -> None:
    """Calls `prepare_data` and `setup`. The processes of a host prepare in turn, so that the second finds what the
    first has fetched; every host prepares, since hosts share no disk."""
    if session.data_hook("prepare_data") is not None:
        with _one_at_a_time():
            session.call_both("prepare_data")
    session.call_both("setup", "fit")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    # A lock on the directory itself leaves no file behind, and ends with its process.
    directory = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def training_source(session: ModuleSession) -> Source:
    """Reads the training dataloader. Raises UserCodeError without one, NeedsTrainerError if it cannot be replaced."""
    loader = _loader(session, "train_dataloader")
    if loader is None:
        raise UserCodeError(
            "neither the LightningModule nor a LightningDataModule has a train_dataloader(); return the pair "
            "(LightningModule, LightningDataModule) if the data is separate"
        )
    return _source(session, loader, "train_dataloader", trains=True)


def validation_source(session: ModuleSession) -> Source | None:
    """Reads the validation dataloader; None without one. Raises NeedsTrainerError as `training_source` does."""
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
    """Returns a note for users if the loader's batch size differs from the recipe's."""
    if source.batch_size == hp.per_replica_batch_size:
        return None
    return (
        f"train_dataloader: batch_size {source.batch_size} is not used; the recipe gives a step "
        f"{hp.global_batch_size} examples, {hp.per_replica_batch_size} per replica"
    )


def _loader(session: ModuleSession, name: str) -> DataLoader[Any] | None:
    method = session.data_hook(name)
    if method is None:
        return None
    with user_code(name):
        loader = method()
    if isinstance(loader, Sequence) and len(loader) <= 1:
        loader = loader[0] if loader else None
    if loader is None or isinstance(loader, DataLoader):
        return loader
    many = f" of {len(loader)}" if isinstance(loader, Sequence) else ""
    raise NeedsTrainerError(f"{name}: it returns a {type(loader).__name__}{many}, not one torch.utils.data.DataLoader")


def _source(session: ModuleSession, loader: DataLoader[Any], name: str, *, trains: bool) -> Source:
    refuse_own_iterator(loader, name)
    if loader.batch_size is None and loader.batch_sampler is None:
        raise NeedsTrainerError(f"{name}: batch_size is None, so the dataset makes the batches")
    sampler = None if isinstance(loader.dataset, IterableDataset) else _sampler(loader, name)
    if sampler is not None and not trains:
        raise NeedsTrainerError(f"{name}: sampler {type(sampler).__name__}")
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    if (before := session.data_hook("on_before_batch_transfer")) is not None:
        collate = Collate(collate, before)
    # A loader with a BatchSampler has no batch size itself.
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", 1)
    return Source(loader.dataset, collate, loader.num_workers, loader.worker_init_fn, size, sampler)


def _sampler(loader: DataLoader[Any], name: str) -> Sampler[Any] | None:
    """Returns the loader's sampler; None if it takes every example once, which the trainer's own order replaces.

    Raises:
        NeedsTrainerError: the sampler makes batches, or has no length.
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
