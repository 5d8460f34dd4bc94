"""Optimizers by the recipe's name, for tasks that bring none; and the settings that a task's own optimizer ignores."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tpu_contract.protocol import OPTIMIZERS
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.optim.device_optimizers import Adafactor, Lion
from tpu_trainer.optim.followed_rate import followed
from tpu_trainer.optim.traced_optimizers import SGD, Adam, AdamW, RMSprop
from tpu_trainer.task.hooks import Hooks
from tpu_trainer.task.task import Hyperparameters, Task

if TYPE_CHECKING:
    from torch.optim import Optimizer

BUILDERS: Mapping[str, Callable[..., Optimizer]] = {
    "adafactor": Adafactor,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
_TRACED: Mapping[str, Callable[..., Optimizer]] = {"adam": Adam, "adamw": AdamW, "rmsprop": RMSprop, "sgd": SGD}
"""What takes their place on an XLA device."""


def build_optimizer(task: Task, hp: Hyperparameters) -> Optimizer:
    """Returns the task's optimizer, or the one that the recipe names. The model must already be on its device."""
    parameters = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserCodeError("the task's model has no parameter to train")
    if task.optimizer is not None:
        with user_code("the task's optimizer"):
            optimizer = task.optimizer(parameters, followed(hp))
        # By its methods, since libraries wrap optimizers.
        if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
            raise UserCodeError(
                f"the task's optimizer must return a torch.optim.Optimizer, got a {type(optimizer).__name__}"
            )
        return optimizer
    if hp.optimizer.lower() not in BUILDERS:
        raise UserCodeError(
            f'the recipe names the optimizer "{hp.optimizer}", the trainer knows {", ".join(sorted(BUILDERS))}; for '
            "any other give the Task an `optimizer`"
        )
    takes = OPTIMIZERS[hp.optimizer.lower()]
    settings: dict[str, Any] = {"momentum": hp.momentum} if "momentum" in takes else {}
    if "beta2" in takes:
        settings |= {"betas": (hp.beta1, hp.beta2)} if "beta1" in takes else {"alpha": hp.beta2}
    settings |= {"eps": hp.epsilon} if "epsilon" in takes else {}
    builders = {**BUILDERS, **_TRACED} if parameters[0].device.type == "xla" else BUILDERS
    with user_code(f"optimizer {hp.optimizer}"):
        build = builders[hp.optimizer.lower()]
        return build(parameters, lr=hp.learning_rate, weight_decay=hp.weight_decay, **settings)


def refuse_closure(optimizer: Optimizer) -> None:
    """Raises UserCodeError if the optimizer's step needs a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserCodeError(
            f"optimizer {type(optimizer).__name__} evaluates a closure (SAM, LBFGS): the trainer's own loop does not "
            "support this. A LightningModule can use it with spec.trainer.loop: Lightning in the job"
        )


_GROUP_KEYS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {
    "momentum": ("momentum", lambda group: group.get("momentum")),
    "weight_decay": ("weightDecay", lambda group: group.get("weight_decay")),
    "beta1": ("beta1", lambda group: _beta(group, 0)),
    "beta2": ("beta2", lambda group: group.get("alpha", _beta(group, 1))),
    "epsilon": ("epsilon", lambda group: group.get("eps")),
}
"""For each hyperparameter, its name in the recipe, and how to find it in an optimizer's parameter groups."""


def find_unused_settings(task: Task, hooks: Hooks, optimizer: Optimizer, hp: Hyperparameters) -> Iterator[str]:
    """Yields one text for each setting of the recipe that this run ignores because the task brings its own."""
    if hp.evaluate_every_steps is not None and task.evaluation is None:
        yield f"evaluateEverySteps {hp.evaluate_every_steps} is not used: the task has nothing to evaluate on"
    if hooks.clips and hp.gradient_clip_norm is not None:
        yield (
            f"the module clips its gradients itself: recipe.gradientClipNorm {hp.gradient_clip_norm:g} is passed to "
            "its configure_gradient_clipping as gradient_clip_val, and nothing else is clipped"
        )
    if task.optimizer is None and task.scheduler is None:
        return
    if hooks.scheduled or task.scheduler is not None:
        yield from find_unused_schedule(hp)
    yield from find_unused_by(optimizer, hp)


def find_unused_schedule(hp: Hyperparameters) -> Iterator[str]:
    """Yields what a task that schedules the rate itself does not use."""
    if hp.warmup_steps or hp.schedule.name != "Constant":
        yield (
            f"the task schedules the learning rate itself; the recipe's {hp.warmup_steps} steps of warm-up and its "
            f"schedule {hp.schedule.name} are not used"
        )


def find_unused_by(optimizer: Optimizer, hp: Hyperparameters) -> Iterator[str]:
    """Yields what an optimizer that the task built does not use.

    A value counts as used once one parameter group has it: the other groups' are deliberate multiples of it.
    """
    yield from _unused_rate(optimizer, hp)
    values = {name: getattr(hp, name) for name in _GROUP_KEYS if name not in hp.silent}
    groups = optimizer.param_groups
    missing = [
        name
        for name, value in values.items()
        if not any(_equal(actual, value) for actual in map(_GROUP_KEYS[name][1], groups))
    ]
    kind = type(optimizer).__name__
    if missing:
        settings = ", ".join(f"{_GROUP_KEYS[name][0]} {values[name]:g}" for name in missing)
        yield (
            f"the recipe's {settings} {'is' if len(missing) == 1 else 'are'} not used: no parameter group of the "
            f"task's {kind} has it. Take {', '.join(f'`{name}`' for name in missing)} as parameters of the entrypoint, "
            "or leave them out of the recipe"
        )
    if _is_another(optimizer, hp.optimizer.lower()):
        yield (
            f"the recipe's optimizer is {hp.optimizer} and the task built {kind}: the learning rate was scaled by the "
            f"rule for {hp.optimizer}. Name {kind.lower()} in recipe.optimizer"
        )


def _is_another(optimizer: Optimizer, named: str) -> bool:
    """Returns whether an optimizer is none of those that the recipe's name may mean, as FusedAdamW is an adamw. False
    for a name that the trainer does not know: it has no scaling rule, so no rate was chosen by it."""
    if named not in BUILDERS:
        return False
    kinds = [owner.__name__.lower() for owner in type(optimizer).__mro__]
    known = next((kind for kind in kinds if kind in BUILDERS), None)
    return named not in kinds[0] if known is None else known != named


def _unused_rate(optimizer: Optimizer, hp: Hyperparameters) -> Iterator[str]:
    groups = optimizer.param_groups
    # A scheduler with its own maximum ignores the optimizer's rate.
    peaks = [group["max_lr"] for group in groups if "max_lr" in group]
    built = peaks or [group.get("initial_lr", group.get("lr")) for group in groups]
    if any(_equal(rate, hp.learning_rate) for rate in built):
        return
    rates = sorted({f"{float(rate):.6g}" for rate in built if rate is not None}, key=float)
    built_with = f"learning rate {_format(rates)}" if rates else "no learning rate"
    what = "the scheduler was built with the maximum" if peaks else "the optimizer was built with"
    yield (
        f"{what} {built_with}; the recipe's scaled rate is {hp.learning_rate:.6g} and is not used: take "
        "`learning_rate` (or `lr`), or all of `hp`, as a parameter of the entrypoint and build with that"
    )


def _beta(group: Mapping[str, Any], index: int) -> Any:
    betas = group.get("betas")
    return betas[index] if isinstance(betas, tuple | list) and len(betas) > index else None


def _equal(actual: Any, value: float) -> bool:
    try:
        return math.isclose(float(actual), value, rel_tol=1e-6)
    except (TypeError, ValueError):
        return False


def _format(rates: list[str]) -> str:
    return rates[0] if len(rates) == 1 else f"{rates[0]} to {rates[-1]} in {len(rates)} groups"
