"""Makes a Task and Hooks from a LightningModule and its dataloaders.

What the trainer's own loop does not support is refused here, or where the module uses it. A dataloader determines the
dataset, the collate function and the number of workers. The order and size of batches follow from the recipe, so that
the trajectory does not depend on the slice.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
)

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data.loading import has_length, refuse_own_iterator, sampler_of, takes_each_once
from tpu_trainer.data.order import Share
from tpu_trainer.lightning.hooks import LightningHooks
from tpu_trainer.lightning.lightning_run import only_under_lightning
from tpu_trainer.lightning.session import ModuleLog, ModuleSession, TrainerView, overrides, takes_index
from tpu_trainer.lightning.validation import Validation, disconnect, metrics_of
from tpu_trainer.task.task import Hyperparameters, Task

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NOT_CALLED = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "on_validation_model_zero_grad"),
    *("configure_callbacks", "configure_sharded_model"),
)
"""Hooks that the trainer's own loop does not call."""


def is_lightning(made: object) -> bool:
    """Returns whether `made` is a torch module with training_step and configure_optimizers."""
    return isinstance(made, nn.Module) and all(
        callable(getattr(made, name, None)) for name in ("training_step", "configure_optimizers")
    )


def adopt(module: nn.Module, data: Any, hp: Hyperparameters, share: Share) -> tuple[Task, LightningHooks]:
    """Returns the task that trains `module` on `data`, a LightningDataModule, or on the module's own data if None.

    Raises:
        UserCodeError: the module has no data, its code raised, or it needs Lightning's own Trainer.
    """
    _refuse(module, data)
    view = TrainerView(hp.train_steps, hp.accumulation_steps, share.world, share.rank, share.local_rank, data)
    session = ModuleSession(module, data, view, ModuleLog(view.callback_metrics))
    _attach(session)
    _prepare(session)
    session.call("configure_model")
    disconnect(metrics_of(module))
    train = _loader(session, "train_dataloader")
    if train is None:
        raise UserCodeError(
            "neither the LightningModule nor a LightningDataModule has a train_dataloader(); return the pair "
            "(LightningModule, LightningDataModule) if the data is separate"
        )
    _note_batch_size(train, hp, share)
    if has_length(train.dataset):
        steps = len(train.dataset) // hp.global_batch_size  # type: ignore[arg-type]
        view.num_training_batches = steps * hp.accumulation_steps
        # At least 1: a dataset shorter than one batch is refused later, where its batches are made.
        view.max_epochs = -(-hp.train_steps // max(steps, 1))
    hooks = LightningHooks(session, hp)
    task = Task(
        model=module,
        train=train.dataset,
        loss=hooks.loss,
        optimizer=hooks.configure,
        collate=_collate(session, train),
        workers=train.num_workers,
        worker_init=train.worker_init_fn,
        **_evaluation(session),
    )
    return task, hooks


def _refuse(module: nn.Module, data: Any) -> None:
    for name in ("training_step", "configure_optimizers"):
        if not overrides(module, name):
            raise UserCodeError(f"{type(module).__name__} has no {name}()")
    if not getattr(module, "automatic_optimization", True):
        raise only_under_lightning(f"{type(module).__name__}.automatic_optimization = False")
    for name in _NOT_CALLED:
        if overrides(module, name):
            raise only_under_lightning(f"{type(module).__name__}.{name}()")
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
        "lr_schedulers": lambda: next((config.scheduler for config in view.lr_scheduler_configs), None),
        "clip_gradients": _clip_gradients,
    }
    for name, value in attributes.items():
        setattr(module, name, value)


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


def _prepare(session: ModuleSession) -> None:
    """Calls `prepare_data` and `setup`. The processes of a host prepare in turn, so that the second finds what the
    first has fetched; every host prepares, since hosts share no disk."""
    # A lock on the directory itself leaves no file behind, and ends with its process.
    directory = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        session.call_both("prepare_data")
    finally:
        os.close(directory)
    session.call_both("setup", "fit")


@dataclass(frozen=True)
class Collate:
    """Collates, then calls `on_before_batch_transfer`. A class, because the workers of a loader must unpickle it."""

    collate: Callable[[list[Any]], Any]
    before_transfer: Callable[[Any, int], Any]

    def __call__(self, examples: list[Any]) -> Any:
        return self.before_transfer(self.collate(examples), 0)


def _collate(session: ModuleSession, loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    before = session.data_hook("on_before_batch_transfer")
    return loader.collate_fn if before is None else Collate(loader.collate_fn, before)


def _evaluation(session: ModuleSession) -> dict[str, Any]:
    """Returns the fields of a Task that evaluates; none without a `validation_step` and its data."""
    loader = _loader(session, "val_dataloader") if session.has("validation_step") else None
    if loader is None:
        return {}
    if isinstance(loader.dataset, IterableDataset):
        raise only_under_lightning("val_dataloader() over an iterable dataset")
    return {
        "evaluation": loader.dataset,
        "evaluation_collate": _collate(session, loader),
        "evaluation_workers": loader.num_workers,
        "evaluation_worker_init": loader.worker_init_fn,
        "evaluator": Validation(session),
    }


def _loader(session: ModuleSession, name: str) -> DataLoader[Any] | None:
    """Returns a dataloader whose batches the trainer's can replace; None without one."""
    method = session.data_hook(name)
    if method is None:
        return None
    with user_code(name):
        loader = method()
    if isinstance(loader, Sequence) and len(loader) <= 1:
        loader = loader[0] if loader else None
    if loader is None:
        return None
    if not isinstance(loader, DataLoader):
        many = f" of {len(loader)}" if isinstance(loader, Sequence) else ""
        raise only_under_lightning(
            f"{name}() returns a {type(loader).__name__}{many}, not one torch.utils.data.DataLoader"
        )
    refuse_own_iterator(loader, name)
    if (kind := _unusual_batches(loader)) is not None:
        raise only_under_lightning(f"{name}() with {kind}")
    return loader


def _unusual_batches(loader: DataLoader[Any]) -> str | None:
    """Returns what makes a loader's batches other than every example once; None if nothing does."""
    if loader.batch_size is None and loader.batch_sampler is None:
        return "batch_size=None"
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler = sampler_of(loader)
    if takes_each_once(sampler):
        return None
    how = " as batch_sampler" if sampler is loader.batch_sampler else ""
    return f"a {type(sampler).__name__}{how or ' that draws a number of examples' * isinstance(sampler, RandomSampler)}"


def _note_batch_size(loader: DataLoader[Any], hp: Hyperparameters, share: Share) -> None:
    """Prints a note for users if the loader's batch size differs from the recipe's."""
    # A loader with a BatchSampler has no batch size itself.
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
    if share.rank == 0 and size != hp.per_replica_batch_size:
        print(
            f"note: train_dataloader: batch_size {size} is not used; the recipe gives a step "
            f"{hp.global_batch_size} examples, {hp.per_replica_batch_size} per replica",
            file=sys.stderr,
            flush=True,
        )
