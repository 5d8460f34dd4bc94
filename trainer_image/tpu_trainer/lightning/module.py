"""Makes a Task and Hooks of a LightningModule.

Everything that can be refused before the first step is refused here, or when the optimizer is built.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from tpu_trainer.data import Share, has_length
from tpu_trainer.errors import UserCodeError
from tpu_trainer.lightning.data import note_batch_size, prepare, training_source, validation_source
from tpu_trainer.lightning.hooks import LightningHooks
from tpu_trainer.lightning.logging import Log
from tpu_trainer.lightning.metrics import metrics_of, without_own_collectives
from tpu_trainer.lightning.session import Session, overridden, takes_index
from tpu_trainer.lightning.trainer import view_of
from tpu_trainer.lightning.validation import Validation
from tpu_trainer.task import Hyperparameters, Task

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NOT_SERVED = {
    "backward": "the backward pass is the trainer's own",
    "configure_callbacks": "callbacks are not served; what they do belongs into hooks of the module",
    "configure_sharded_model": "the model is replicated, not sharded",
}


def is_lightning(made: object) -> bool:
    """A torch module that has a step and an optimizer of its own is taken for a LightningModule, whatever its class."""
    return isinstance(made, nn.Module) and all(
        callable(getattr(made, name, None)) for name in ("training_step", "configure_optimizers")
    )


def adopt(module: nn.Module, data: Any, hp: Hyperparameters, share: Share) -> tuple[Task, LightningHooks]:
    """The task that trains `module` on the data of `data`, a LightningDataModule, or on the module's own if None.

    Raises:
        UserCodeError: the module wants what this trainer has not, or has no data, or raised.
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
        steps = len(training.dataset) // hp.global_batch_size  # type: ignore[arg-type]
        view.num_training_batches = steps * hp.accumulation_steps
        # A dataset shorter than one batch is refused where its batches are made.
        view.max_epochs = -(-hp.train_steps // max(steps, 1))
    hooks = LightningHooks(session, hp, evaluated=held_out is not None)
    task = Task(
        model=module,
        train=training.dataset,
        loss=hooks.loss,
        optimizer=hooks.configure,
        collate=training.collate,
        workers=training.workers,
        evaluation=held_out.dataset if held_out else None,
        evaluation_collate=held_out.collate if held_out else None,
        evaluator=Validation(session) if held_out else None,
    )
    return task, hooks


def _refuse(module: nn.Module, data: Any) -> None:
    if not getattr(module, "automatic_optimization", True):
        raise UserCodeError(
            f"{type(module).__name__}: automatic_optimization is False; this trainer makes the backward pass and the "
            "optimizer's step itself, manual optimization is not served"
        )
    for name in ("training_step", "configure_optimizers"):
        if not overridden(module, name):
            raise UserCodeError(f"{type(module).__name__} has no {name}()")
    for name, why in _NOT_SERVED.items():
        if overridden(module, name):
            raise UserCodeError(f"{type(module).__name__} overrides {name}(): {why}")
    for name in ("training_step", "validation_step"):
        if overridden(module, name):
            takes_index(getattr(module, name))
    if data is not None and not callable(getattr(data, "train_dataloader", None)):
        raise UserCodeError(
            f"the second of the pair is a {type(data).__name__}; it must be a LightningDataModule, which has "
            "train_dataloader()"
        )


def _attach(session: Session) -> None:
    """What the module asks its Trainer for is answered by the view, by this trainer's log and by its one optimizer."""
    module, view = session.module, session.view
    if session.data is not None:
        session.data.trainer = view
    # Set on the object, in front of Lightning's own methods, which speak to a real Trainer.
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
