"""How a run has changed what it trains since its optimizer was built: groups that hooks added, parameters that they
froze or unfroze, modules that they put into evaluation mode or back. A resumed run builds the optimizer as the first
one did, and the hooks of past epochs do not run again: so a checkpoint keeps the difference. Held by `replica`, kept in
the checkpoint's document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tpu_trainer.errors import UserCodeError, user_code

if TYPE_CHECKING:
    from torch.optim import Optimizer

Group = dict[str, Any]


class Growth:
    """Made when the optimizer has just been built."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._built = len(optimizer.param_groups)
        self._required = self._requires()
        self._flipped: set[str] = set()
        self._built_modes = self._modes()
        self._changed_modes: dict[str, bool] | None = None
        self._restored: set[nn.Parameter] = set()

    def state(self) -> dict[str, Any]:
        """As JSON: the names in every group, the options of those added since, who has been frozen or unfrozen, and
        the modules whose mode is another since, with that mode: True for training."""
        groups = self._optimizer.param_groups
        return {
            "names": [self._names(group) for group in groups],
            "added": [_options(group) for group in groups[self._built :]],
            "flipped": [name for name, required in self._requires().items() if required != self._required.get(name)],
            "modes": {name: mode for name, mode in self._modes().items() if mode != self._built_modes.get(name, True)},
        }

    def load(self, kept: Mapping[str, Any] | None) -> None:
        """Adds the groups that are missing, and gives the others the checkpoint's order of parameters, by which the
        optimizer's state is found. None: a checkpoint that does not say.

        Raises:
            UserCodeError: the optimizer was built with other parameters.
        """
        if kept is None:
            return
        groups, added = self._optimizer.param_groups, kept["added"]
        built = kept["names"][: len(kept["names"]) - len(added)]
        if len(built) != len(groups):
            raise _misfit(f"{len(built)} parameter groups", str(len(groups)))
        for place, (group, names) in enumerate(zip(groups, built, strict=True)):
            self._order(place, group, names)
        parameters = dict(self._model.named_parameters())
        for names, options in zip(kept["names"][len(built) :], added, strict=True):
            if unknown := [name for name in names if name not in parameters]:
                raise _misfit(f"{unknown[0]} in a parameter group", "a model without it")
            group = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
            group["params"] = [parameters[name] for name in names]
            with user_code("adding the checkpoint's parameter groups to the optimizer"):
                self._optimizer.add_param_group(group)
            self._restored.update(group["params"])
        self._flipped = set(kept["flipped"])
        self._changed_modes = kept.get("modes")

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Around the hooks of the start. The epoch's may add a group that `load` has put back: it is there already.
        And what they freeze as at the very start is afterwards as it was at the checkpoint."""
        add = self._optimizer.add_param_group

        def add_missing(group: Group) -> None:
            given = group["params"]
            parameters = [given] if isinstance(given, Tensor) else list(given)
            if not parameters or not self._restored.issuperset(parameters):
                add({**group, "params": parameters})

        if not self._restored and not self._flipped and not self._changed_modes:
            yield
            return
        vars(self._optimizer)["add_param_group"] = add_missing
        try:
            yield
        finally:
            del vars(self._optimizer)["add_param_group"]
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(self._required.get(name, True) != (name in self._flipped))
        if self._changed_modes is None:
            return
        for name, module in self._model.named_modules():
            module.training = self._changed_modes.get(name, self._built_modes.get(name, True))

    def _order(self, place: int, group: Group, names: list[str]) -> None:
        here = self._names(group)
        if here == names:
            return
        if sorted(here) != sorted(names):
            there = next((name for name in names if name not in here), "nothing")
            now = next((name for name in here if name not in names), "nothing")
            raise _misfit(f"{there} in parameter group {place}", now)
        by_name = dict(zip(here, group["params"], strict=True))
        group["params"] = [by_name[name] for name in names]

    def _names(self, group: Group) -> list[str]:
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        return [names.get(parameter, "") for parameter in group["params"]]

    def _modes(self) -> dict[str, bool]:
        return {name: module.training for name, module in self._model.named_modules()}

    def _requires(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}


def _options(group: Group) -> Group:
    """What JSON holds of a group's options, which is all of them in torch's own optimizers."""
    plain = {
        key: float(value) if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }
    return {key: value for key, value in plain.items() if isinstance(value, int | float | str | list | tuple | None)}


def _misfit(there: str, here: str) -> UserCodeError:
    return UserCodeError(f"the checkpoint does not fit the optimizer: {there} in the checkpoint, {here} in this run")
