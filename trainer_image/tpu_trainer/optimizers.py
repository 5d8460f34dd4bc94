"""Optimizers by the recipe's name, for tasks that bring none of their own, and the learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.task import Hyperparameters, Task

if TYPE_CHECKING:
    from torch.optim import Optimizer

Parameters = Iterable[nn.Parameter]


def _sgd(parameters: Parameters, hp: Hyperparameters) -> Optimizer:
    return torch.optim.SGD(parameters, lr=hp.learning_rate, momentum=hp.momentum, weight_decay=hp.weight_decay)


def _adam(parameters: Parameters, hp: Hyperparameters) -> Optimizer:
    betas = (hp.beta1, hp.beta2)
    return torch.optim.Adam(parameters, lr=hp.learning_rate, betas=betas, eps=hp.epsilon, weight_decay=hp.weight_decay)


def _adamw(parameters: Parameters, hp: Hyperparameters) -> Optimizer:
    betas = (hp.beta1, hp.beta2)
    return torch.optim.AdamW(parameters, lr=hp.learning_rate, betas=betas, eps=hp.epsilon, weight_decay=hp.weight_decay)


BUILDERS: dict[str, Callable[[Parameters, Hyperparameters], Optimizer]] = {
    "adam": _adam,
    "adamw": _adamw,
    "sgd": _sgd,
}


def build_optimizer(task: Task, hp: Hyperparameters) -> Optimizer:
    """The task's own optimizer, or the one the recipe names. The model must be on its device already."""
    parameters = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserCodeError("the task's model has no parameter to train")
    if task.optimizer is not None:
        with user_code("the task's optimizer"):
            return task.optimizer(parameters, hp)
    builder = BUILDERS.get(hp.optimizer)
    if builder is None:
        raise UserCodeError(
            f'the recipe names the optimizer "{hp.optimizer}", the trainer knows {", ".join(sorted(BUILDERS))}; for '
            "any other give the Task an `optimizer`"
        )
    with user_code(f"optimizer {hp.optimizer}"):
        return builder(parameters, hp)
