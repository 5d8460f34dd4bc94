"""Determines which parameters a step trains, and keeps in checkpoints how hooks have changed that.

A resumed run builds its optimizer as the first one did, and the hooks of past epochs do not run again. So a checkpoint
keeps the parameter groups that hooks added, the parameters they froze or unfroze, and the modules they switched into
evaluation mode or back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tpu_contract.words import several
from tpu_trainer.checkpoint.resume import Start
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.doctor.last_weights import Closing
from tpu_trainer.loop.evaluation_policy import EvaluationPolicy
from tpu_trainer.optim.adascale import AdaScale
from tpu_trainer.optim.schedule import LearningRateSetter
from tpu_trainer.optim.schedulers import Schedules
from tpu_trainer.optim.update import Average
from tpu_trainer.task.hooks import Hooks
from tpu_trainer.task.logbook import Logbook
from tpu_trainer.task.task import Hyperparameters, Task

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpu_trainer.optim.sharding import OptimizerSharding

Group = dict[str, Any]

_SHOWN = 3
_PATIENCE = 10
"""Steps after which a parameter that was unfrozen should have had a gradient."""


@dataclass(frozen=True)
class PreparedTask:
    """A task that is ready to train: model and optimizer are on the device, with the checkpoint's state if there is
    one.

    skips: a step that is not finite is left out (recipe.onNotFinite). begun_with: where the initial weights come from,
    None if the task made them. clip_norm: the trainer scales gradients down to this length; None if it does not clip,
    or the task does so itself. sharding: how the optimizer's state is divided among the replicas, if it is.
    on_lower_rung: a rung of a ladder, whose end is not the training's. noise_scale: it is asked for. gains: sets the
    rates, None without AdaScale.
    """

    task: Task
    hooks: Hooks
    hp: Hyperparameters
    optimizer: Optimizer
    rates: LearningRateSetter
    schedules: Schedules
    group_changes: ParameterGroupChanges
    start: Start
    policy: EvaluationPolicy
    skips: bool
    logbook: Logbook
    closing: Closing
    on_lower_rung: bool = False
    noise_scale: bool = False
    gains: AdaScale | None = None
    average: Average | None = None
    begun_with: str | None = None
    clip_norm: float | None = None
    sharding: OptimizerSharding | None = None

    @property
    def measures(self) -> bool:
        """Whether the squared lengths of the passes' own gradients are measured."""
        return self.noise_scale or (self.gains is not None and self.gains.measures)

    @property
    def averaged(self) -> Mapping[str, Tensor]:
        """Returns the averaged weights by name, on the device; empty if the run averages none."""
        return {} if self.average is None else self.average.tensors


class Trainable:
    """The parameters in the optimizer's groups, in the model's order, which is the same on all replicas; the groups'
    own order may come from a set. `warn`: is called once for parameters that get a gradient and are in no group, and
    once for parameters that are unfrozen and get none."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, warn: Callable[[str], None]) -> None:
        self._model, self._optimizer, self._warn = model, optimizer, warn
        self._has_warned = False
        self._held: list[nn.Parameter] = []
        self._ordered: list[nn.Parameter] = []
        self._others: list[nn.Parameter] = []
        self._trained: Sequence[nn.Parameter] | None = None
        self._silent: dict[nn.Parameter, int] = {}

    def now(self, *, settled: bool) -> list[nn.Parameter]:
        """Returns the parameters that require a gradient. Deletes the gradients of all others, which neither an update
        nor `zero_grad` would touch. `settled`: no hook will add another group.

        Raises:
            UserCodeError: the optimizer holds a parameter that the model does not.
        """
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            self._order(held)
        trained = [parameter for parameter in self._ordered if parameter.requires_grad]
        # Their gradients show it: a frozen part has none, and neither has a part under no_grad, such as a teacher.
        if settled and not self._has_warned and any(parameter.grad is not None for parameter in self._others):
            self._has_warned = True
            self._warn(self._left_out())
        for parameter in self._others:
            parameter.grad = None
        for parameter in self._ordered:
            if not parameter.requires_grad:
                parameter.grad = None
        return trained

    def watch(self, trained: Sequence[nn.Parameter]) -> None:
        """Warns of parameters that have been unfrozen and get no gradient on any replica. `trained`: from `now`; call
        this after the exchange."""
        before, self._trained = self._trained, trained
        silent = [parameter for parameter in trained if parameter.grad is None]
        if not silent:
            self._silent.clear()
            return
        known = set(trained if before is None else before)
        self._silent = {
            parameter: self._silent.get(parameter, 0) + 1
            for parameter in silent
            if parameter not in known or parameter in self._silent
        }
        if late := {parameter for parameter, steps in self._silent.items() if steps == _PATIENCE}:
            names = [name for name, parameter in self._model.named_parameters() if parameter in late]
            self._warn(
                f"{several(names, _SHOWN)} {'was' if len(names) == 1 else 'were'} unfrozen during the training and got "
                f"no gradient in the {_PATIENCE} steps since: the loss does not use them, so they are not trained"
            )

    def _order(self, held: list[nn.Parameter]) -> None:
        model, ids = list(self._model.parameters()), {id(parameter) for parameter in held}
        known = {id(parameter) for parameter in model}
        for parameter in held:
            if id(parameter) not in known:
                raise UserCodeError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not in the task's "
                    "model: no checkpoint would have it, and each replica would train its own. Make it part of the "
                    "model, and build the optimizer from the parameters that it is given"
                )
        self._held = held
        self._ordered = [parameter for parameter in model if id(parameter) in ids]
        self._others = [parameter for parameter in model if id(parameter) not in ids]

    def _left_out(self) -> str:
        others, named = {id(parameter) for parameter in self._others}, list(self._model.named_parameters())
        names = [name for name, parameter in named if parameter.grad is not None and id(parameter) in others]
        return (
            f"{len(names)} of the model's {len(named)} parameters are not trained: {several(names, _SHOWN)} get a "
            "gradient from the loss and are in no parameter group of the optimizer. Add them to one, or freeze them "
            "(requires_grad_(False)), which saves their gradients"
        )


class ParameterGroupChanges:
    """How hooks have changed what is trained since the optimizer was built, which is when this is created."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._built = len(optimizer.param_groups)
        self._built_requires = self._requires()
        self._flipped: set[str] = set()
        self._built_modes = self._modes()
        self._changed_modes: dict[str, bool] | None = None
        self._restored: set[nn.Parameter] = set()

    def state(self) -> dict[str, Any]:
        """Returns as JSON: the parameter names of every group, the options of the added groups, the parameters that
        were frozen or unfrozen, and the modules whose mode has changed, with that mode: True for training."""
        groups = self._optimizer.param_groups
        return {
            "names": [self._names(group) for group in groups],
            "added": [_json_options(group) for group in groups[self._built :]],
            "flipped": [
                name for name, required in self._requires().items() if required != self._built_requires.get(name)
            ],
            "modes": {name: mode for name, mode in self._modes().items() if mode != self._built_modes.get(name, True)},
        }

    def load(self, kept: Mapping[str, Any] | None) -> None:
        """Adds the missing groups and gives the others the checkpoint's order of parameters, which numbers the
        optimizer's state. `kept`: None in an older checkpoint.

        Raises:
            UserCodeError: the optimizer was built with other parameters.
        """
        if kept is None:
            return
        groups, added = self._optimizer.param_groups, kept["added"]
        built = kept["names"][: len(kept["names"]) - len(added)]
        if len(built) != len(groups):
            raise _misfit_error(f"{len(built)} parameter groups", str(len(groups)))
        for place, (group, names) in enumerate(zip(groups, built, strict=True)):
            self._order(place, group, names)
        parameters = dict(self._model.named_parameters())
        for names, options in zip(kept["names"][len(built) :], added, strict=True):
            if unknown := [name for name in names if name not in parameters]:
                raise _misfit_error(f"{unknown[0]} in a parameter group", "a model without it")
            group = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
            group["params"] = [parameters[name] for name in names]
            with user_code("adding the checkpoint's parameter groups to the optimizer"):
                self._optimizer.add_param_group(group)
            self._restored.update(group["params"])
        self._flipped = set(kept["flipped"])
        self._changed_modes = kept.get("modes")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Keeps the restored state while the block runs the hooks of a training's start: a group that `load` has
        restored is not added twice, and what the hooks freeze is afterwards as it was at the checkpoint."""
        if not self._restored and not self._flipped and not self._changed_modes:
            yield
            return
        add = self._optimizer.add_param_group

        def add_missing(group: Group) -> None:
            params = group["params"]
            parameters = [params] if isinstance(params, Tensor) else list(params)
            if not parameters or not self._restored.issuperset(parameters):
                add({**group, "params": parameters})

        vars(self._optimizer)["add_param_group"] = add_missing
        try:
            yield
        finally:
            del vars(self._optimizer)["add_param_group"]
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(self._built_requires.get(name, True) != (name in self._flipped))
        if self._changed_modes is not None:
            for name, module in self._model.named_modules():
                module.training = self._changed_modes.get(name, self._built_modes.get(name, True))

    def _order(self, place: int, group: Group, names: list[str]) -> None:
        here = self._names(group)
        if here == names:
            return
        if sorted(here) != sorted(names):
            there = next((name for name in names if name not in here), "nothing")
            now = next((name for name in here if name not in names), "nothing")
            raise _misfit_error(f"{there} in parameter group {place}", now)
        by_name = dict(zip(here, group["params"], strict=True))
        group["params"] = [by_name[name] for name in names]

    def _names(self, group: Group) -> list[str]:
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        return [names.get(parameter, "") for parameter in group["params"]]

    def _modes(self) -> dict[str, bool]:
        return {name: module.training for name, module in self._model.named_modules()}

    def _requires(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}


def refuse_lazy(model: nn.Module) -> None:
    """Raises UserCodeError if a parameter has no shape yet: it cannot be placed, summed or checkpointed."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UserCodeError(
                f"the model's {name} has no shape before the first batch; give its layer the number of inputs, or run "
                "one batch through the model before it is returned"
            )


def refuse_synchronised_norm(model: nn.Module, backend: str, device: torch.device) -> None:
    """Refuses a SyncBatchNorm in training mode, where torch's raises, or silently normalises over one process's
    examples.

    Raises:
        UserCodeError: the model has one on such a device.
    """
    if device.type not in ("cpu", "xla"):
        return
    instead = {
        "xla": "use BatchNorm with backend XLASPMD, which normalises over the global batch",
        "xla-spmd": "use BatchNorm, which normalises over the global batch with backend XLASPMD",
        "torch": "on a CPU use BatchNorm, which normalises over the examples of each process",
    }
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise UserCodeError(
                f"the model's {name or 'root'} is a SyncBatchNorm, which torch has for GPUs only; {instead[backend]}"
            )


def _json_options(group: Group) -> Group:
    """Returns the group's options that fit into JSON: in torch's own optimizers, all of them."""
    plain = {
        key: float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }
    return {key: value for key, value in plain.items() if isinstance(value, int | float | str | list | tuple | None)}


def _misfit_error(there: str, here: str) -> UserCodeError:
    return UserCodeError(f"the checkpoint does not fit the optimizer: {there} in the checkpoint, {here} in this run")
