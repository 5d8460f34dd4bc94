"""Which parameters a step trains: asked in every step, because hooks may freeze, unfreeze and add groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from tpu_trainer.errors import UserCodeError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Trainable:
    """The parameters in the optimizer's groups, in the model's order, which is the same on all replicas: the groups'
    own may come from a set."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._held: list[nn.Parameter] = []
        self._ordered: list[nn.Parameter] = []
        self._others: list[nn.Parameter] = []

    def now(self) -> list[nn.Parameter]:
        """Those that require a gradient. All others lose theirs, which no update and no `zero_grad` would touch.

        Raises:
            UserCodeError: the optimizer holds a parameter that the model does not.
        """
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            self._order(held)
        for parameter in self._others:
            parameter.grad = None
        trained = []
        for parameter in self._ordered:
            if parameter.requires_grad:
                trained.append(parameter)
            else:
                parameter.grad = None
        return trained

    def _order(self, held: list[nn.Parameter]) -> None:
        ids, model = {id(parameter) for parameter in held}, list(self._model.parameters())
        known = {id(parameter) for parameter in model}
        for parameter in held:
            if id(parameter) not in known:
                raise UserCodeError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not in the task's "
                    "model: it would be in no checkpoint, and each replica would train its own. Make it a part of the "
                    "model, and build the optimizer from the parameters that it is given"
                )
        self._held = held
        self._ordered = [parameter for parameter in model if id(parameter) in ids]
        self._others = [parameter for parameter in model if id(parameter) not in ids]


def refuse_lazy(model: nn.Module) -> None:
    """Raises UserCodeError where a parameter has no shape yet: nothing can be placed, summed or kept of it."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UserCodeError(
                f"the model's {name} has no shape before the first batch; give its layer the number of inputs, or run "
                "one batch through the model before it is returned"
            )
