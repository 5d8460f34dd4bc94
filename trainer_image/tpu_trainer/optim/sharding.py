"""recipe.sharding: Optimizer. Each replica keeps the optimizer's state for its own part of every parameter: stage 1 of
ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1).

Gradients are exchanged as usual, so clipping, hooks and the gradient's norm see all of them. Then every replica updates
its part of each parameter, and the parts are joined. The number of the part is data on the device, so that all replicas
run the same program.

Between the steps schedulers, hooks and checkpoints see an ordinary optimizer: its groups hold the model's parameters,
which are also the keys of its state; only the tensors in the state are smaller.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.gang.backends.base import GROUP_BYTES, Backend, in_groups
from tpu_trainer.optim.update import tensors_in
from tpu_trainer.optim.without_compiler import spare_step

if TYPE_CHECKING:
    from torch.optim import Optimizer

Group = dict[str, Any]

SMALLEST = 1024
"""Elements of the smallest parameter that is divided: a part of a smaller one saves less than its transfer costs."""


def divides(parameter: Tensor) -> bool:
    """Returns whether the parameter is divided; every replica updates all of any other."""
    return parameter.numel() >= SMALLEST and parameter.is_floating_point()


@dataclass(frozen=True)
class _Part:
    """A parameter of the model, and what the optimizer updates in its place during a step."""

    full: nn.Parameter
    local: nn.Parameter


class OptimizerSharding:
    """Divides the steps of `optimizer`, which `refuse_indivisible` has accepted, from its creation on."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, backend: Backend) -> None:
        self._optimizer, self._backend = optimizer, backend
        # The groups' own order may come from a set, and differ from replica to replica.
        self._places = {parameter: place for place, parameter in enumerate(model.parameters())}
        self._parts: list[_Part] = []
        self._groups: list[list[nn.Parameter]] = []
        self._orders: dict[tuple[int, ...], int] = {}
        optimizer.register_step_pre_hook(self._divide)
        optimizer.register_step_post_hook(self._join)

    def parts(self, state: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """Returns the tensors of the optimizer's state that are parts, by name ("/0/exp_avg"), each with its parameter;
        in the same order in every replica."""
        parameters = self._divided()
        parts = {}
        for name, tensor in state.items():
            _, number, *_ = name.split("/")
            parameter = parameters.get(number)
            if parameter is not None and tensor.shape == (self._length(parameter),):
                parts[name] = parameter
        return dict(sorted(parts.items(), key=lambda item: (self._places[item[1]], item[0].split("/")[2:])))

    def describe(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the state with parts replaced by tensors without values, in the shape and type of the full
        tensors."""
        parts = self.parts(state)
        return {
            name: torch.empty(parts[name].shape, dtype=tensor.dtype, device="meta") if name in parts else tensor
            for name, tensor in state.items()
        }

    def gather(self, state: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
        """Returns the full tensors of the `wanted` parts of the state, in host memory. A collective, whatever is
        wanted.

        Takes device memory for one group of them at a time.
        """
        parts, gathered = self.parts(state), {}
        for names in named_groups({name: state[name] for name in parts}, GROUP_BYTES // self._backend.world):
            joined = self._backend.join([state[name].detach() for name in names])
            # All of them, because replicas that want different ones must run the same program.
            self._backend.sync()
            every = self._backend.reads_together
            read = [(name, tensor) for name, tensor in zip(names, joined, strict=True) if every or name in wanted]
            for (name, _), here in zip(read, self._backend.to_host([tensor for _, tensor in read]), strict=True):
                if name in wanted:
                    gathered[name] = _cut(here, parts[name]).clone()
        return gathered

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        """Returns this replica's part of a tensor of a checkpoint; all of it if it is not divided."""
        _, number, *_ = name.split("/")
        parameter = self._divided().get(number)
        return tensor if parameter is None or tensor.shape != parameter.shape else self._backend.part(tensor)

    def _divided(self) -> dict[str, nn.Parameter]:
        """Returns the divided parameters, by their numbers in the optimizer's state."""
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return {str(number): parameter for number, parameter in enumerate(parameters) if divides(parameter)}

    def _length(self, parameter: Tensor) -> int:
        return -(-parameter.numel() // self._backend.world)

    @torch.no_grad()
    def _divide(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Puts the parts in the parameters' place, in the groups and as keys of the state; called before a step."""
        self._parts, self._groups = [], [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._make_part(parameter) for parameter in group["params"]]
        self._parts.sort(key=lambda part: self._places[part.full])

    def _make_part(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.grad is None or not divides(parameter):
            return parameter
        local = nn.Parameter(self._backend.part(parameter.detach()))
        local.grad = self._backend.part(parameter.grad)
        if parameter in self._optimizer.state:
            self._optimizer.state[local] = self._optimizer.state.pop(parameter)
        self._parts.append(_Part(parameter, local))
        return local

    @torch.no_grad()
    def _join(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Joins the parts and restores groups and state; called after a step."""
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        for part in self._parts:
            if part.local in optimizer.state:
                optimizer.state[part.full] = optimizer.state.pop(part.local)
                _check_state(optimizer, part)
        # The mark is alive until the first parts are joined.
        parts, _mark = iter(self._parts), self._mark_of_order()
        for tensors in in_groups([part.local.detach() for part in self._parts], GROUP_BYTES // self._backend.world):
            for joined in self._backend.join(tensors):
                parameter = next(parts).full
                parameter.copy_(_cut(joined, parameter))
        self._parts = []

    def _mark_of_order(self) -> Tensor | None:
        """Returns a tensor for the program of the step, where joining sends one off: as long as the number of the order
        in which parameters are updated.

        torch_xla 2.9 takes two programs for one if they differ only in which of two tensors of one shape they read
        where. These do if experts of one shape take turns: the new state has the order in which it was made first, the
        new parts have that of the groups.
        """
        if not self._backend.reads_free:
            return None
        updated = (parameter for group in self._groups for parameter in group if parameter.grad is not None)
        order = tuple(self._places[parameter] for parameter in updated)
        return torch.zeros(self._orders.setdefault(order, len(self._orders)), device=self._backend.device)


def _cut(joined: Tensor, like: Tensor) -> Tensor:
    """Returns joined parts without the padding at their end, in the shape of `like`."""
    return joined[: like.numel()].reshape(like.shape)


def named_groups(tensors: Mapping[str, Tensor], limit: int = GROUP_BYTES) -> Iterator[list[str]]:
    """Groups the names of the tensors in order, as `in_groups` does."""
    names = iter(tensors)
    for group in in_groups(tensors.values(), limit):
        yield [next(names) for _ in group]


def _check_state(optimizer: Optimizer, part: _Part) -> None:
    for tensor in tensors_in(optimizer.state[part.full]):
        if tensor.numel() > 1 and tensor.shape != part.local.shape:
            raise _indivisible(
                optimizer, f"its state for {part.local.numel()} elements has the shape {list(tensor.shape)}"
            )


def refuse_indivisible(optimizer: Optimizer, backend: Backend) -> None:
    """Checks that two steps give the same with a small parameter and with its two halves. Norms over a parameter, as in
    LAMB and Adafactor, differ: the halves have different scales.

    Raises:
        UserCodeError: the optimizer's update of an element depends on other elements, so parts of a parameter cannot be
            updated on their own.
    """
    values = torch.tensor([1.0, 2.0, -3.0, 4.0, 50.0, -60.0, 70.0, 80.0])
    slopes = values.flip(0) / 10
    for group in _kinds_of_groups(optimizer):
        try:
            full = _try_steps(optimizer, group, backend, [(values.reshape(2, 4), slopes.reshape(2, 4))])
            halves = _try_steps(optimizer, group, backend, [(values[:4], slopes[:4]), (values[4:], slopes[4:])])
        except Exception as error:
            # Without the cause, whose traceback through torch's files would replace this message.
            raise _indivisible(
                optimizer, f"two steps with eight numbers failed: {type(error).__name__}: {error}"
            ) from None
        if not torch.allclose(full, halves, rtol=1e-5, atol=1e-6):
            raise _indivisible(
                optimizer, "the halves of a parameter, updated separately, get other values than the full parameter"
            )


def _kinds_of_groups(optimizer: Optimizer) -> Iterator[Group]:
    """Yields one parameter group of each kind. Groups that differ only in numbers, such as rates, are of one kind; a
    switch may select another rule, for example for matrices."""
    seen = set()
    for group in optimizer.param_groups:
        switches = {name: value for name, value in group.items() if isinstance(value, bool | str | None)}
        if (kind := repr(sorted(switches.items()))) not in seen:
            seen.add(kind)
            yield group


def _try_steps(optimizer: Optimizer, group: Group, backend: Backend, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns all values after two steps of a copy of the optimizer with a single group, which has the options of
    `group`. `pairs`: parameters with their gradients."""
    parameters = [nn.Parameter(backend.to_device(value.clone())) for value, _ in pairs]
    rate = torch.full_like(group["lr"], 0.1) if isinstance(group.get("lr"), Tensor) else 0.1
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {
        # A scheduler may have wrapped the step of this instance.
        **{name: value for name, value in vars(optimizer).items() if name != "step"},
        "state": defaultdict(dict),
        "param_groups": [{**group, "lr": rate, "params": parameters}],
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    spare_step(twin)
    for _ in range(2):
        for parameter, (_, slope) in zip(parameters, pairs, strict=True):
            parameter.grad = backend.to_device(slope.clone())
        twin.step()
        backend.sync()
    return torch.cat([value.detach().reshape(-1) for value in backend.to_host(parameters)])


def _indivisible(optimizer: Optimizer, why: str) -> UserCodeError:
    return UserCodeError(
        "recipe.sharding: Optimizer divides every parameter among the replicas, so it needs an optimizer that updates "
        f"each element by itself, such as AdamW or SGD; {type(optimizer).__name__} does not: {why}. Leave out "
        "recipe.sharding, or use another optimizer"
    )
