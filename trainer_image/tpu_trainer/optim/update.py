"""The update of a step: the optimizer's step and the moving average of the weights, and which of them count.

With recipe.onNotFinite: Skip, a step whose loss or gradients are not finite leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.gang.backends.base import Backend, as_real
from tpu_trainer.gang.exchange import Loss, Sums, square, widen
from tpu_trainer.optim.in_place import call_in_place
from tpu_trainer.optim.scalars_as_data import ScalarsAsData
from tpu_trainer.optim.traced_optimizers import TracedOptimizer
from tpu_trainer.task.hooks import Hooks

if TYPE_CHECKING:
    from torch.optim import Optimizer

Place = tuple[Any, ...]
"""What a tensor belongs to, and where it is there."""


class Average:
    """The exponential moving average of the weights (recipe.emaDecay), on the device, in the step's own program.

    average = decay x average + (1 - decay) x weights after every step; it starts as the weights before the first step.
    Evaluations use it in place of the weights; buffers, such as batch norm's statistics, stay the model's own. Only
    trained parameters have one; a parameter that is unfrozen later joins with the values of its first step.
    Low-precision weights are averaged in float32: in bfloat16 a step's share of 1 - decay would round to nothing.
    """

    def __init__(self, model: nn.Module, decay: float, backend: Backend) -> None:
        """`model` is on its device, with its initial weights."""
        self._parameters = dict(model.named_parameters())
        self._decay, self._backend = decay, backend
        self._held: dict[str, Tensor] = {}
        self.update()
        # Left pending, the copies would be compiled into the first step.
        backend.sync()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The averages by parameter name, on the device."""
        return self._held

    @property
    def grows(self) -> bool:
        """Whether the next update adds a parameter."""
        return any(part.requires_grad and name not in self._held for name, part in self._parameters.items())

    @torch.no_grad()
    def update(self) -> None:
        """Updates the averages; called after the optimizer's step."""
        for name, parameter in self._parameters.items():
            held = self._held.get(name)
            if held is not None:
                now = parameter.detach().to(held.dtype)
                call_in_place(Tensor.lerp_, (held, now, 1 - self._decay), {})
            elif parameter.requires_grad:
                # Not .to(copy=True): on XLA that shares the parameter's buffer, and the next step, which changes the
                # average in place, would take the buffer from a parameter that it does not change.
                self._held[name] = parameter.detach().to(_precise(parameter.dtype)).clone()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores `tensors` from a checkpoint's, which are on the host, or on the meta device if their values come
        later."""
        for name, value in tensors.items():
            here = torch.empty_like(value, device="cpu") if value.is_meta else value
            self._held[name] = here.to(self._parameters[name].device, copy=True)
        self._backend.sync()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Replaces the model's weights by the averages in the block; takes memory for a copy of the weights."""
        # Replaces the tensors and not their values: torch_xla would let copied values share a buffer with their source,
        # and a later program would take it from both.
        weights = {name: self._parameters[name].data for name in self._held}
        try:
            # A copy: an evaluation may change weights, as embeddings with a `max_norm` do.
            self._put({name: held.to(weights[name].dtype).clone() for name, held in self._held.items()})
            yield
        finally:
            self._put(weights)

    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parameters[name].data = value
        self._backend.sync()


class Update:
    """Updates the parameters in every step.

    `clip_norm`: gradients are scaled down to this length; None: they are not clipped.
    """

    def __init__(
        self, optimizer: Optimizer, hooks: Hooks, average: Average | None, clip_norm: float | None, backend: Backend
    ) -> None:
        self._optimizer, self._hooks, self._average, self._clip_norm = optimizer, hooks, average, clip_norm
        self._backend = backend
        has_numbers = backend.device.type == "xla" and not isinstance(optimizer, TracedOptimizer)
        self._numbers: AbstractContextManager[Any] = ScalarsAsData() if has_numbers else nullcontext()
        self._owners = 0

    def begins(self) -> None:
        """Called before the step's first forward pass."""

    def passed(self) -> None:
        """Called after each of the step's passes, before it is sent to the device."""

    def make(self, parameters: Sequence[nn.Parameter], sums: Sums) -> None:
        """Makes the update. `parameters`: those that the step trains. `sums`: the results of the exchange."""
        with user_code("the optimizer's step"):
            self._hooks.before_update(self._optimizer)
            if self._clip_norm is not None:
                clip(parameters, self._norm(parameters, sums), self._clip_norm)
            with self._numbers:
                self._optimizer.step()
            if self._backend.device.type == "xla" and len(self._optimizer.state) != self._owners:
                self._owners = len(self._optimizer.state)
                _put_in_order(self._optimizer)
        if self._average is not None:
            self._average.update()

    def _norm(self, parameters: Sequence[nn.Parameter], sums: Sums) -> Tensor:
        if not self._hooks.changes_gradients:
            return sums.norm
        with torch.no_grad():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            return square(gradients, sums.norm).sqrt()


class SkippingUpdate(Update):
    """Undoes steps that are not finite. All replicas decide alike, because they have the same sums.

    The host must not wait for the device in every step. So on a device that lags behind the host the step is always
    made, and the device then selects old or new values. The host waits only where there are no old values, in a step
    that creates state (the optimizer's for a parameter that is trained for the first time, or a new average), and in
    every step of an optimizer that counts on the host, as torch's Adagrad does.

    A skipped step leaves unchanged: parameters and their average, the optimizer's state, and the model's buffers, which
    the forward pass has changed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        hooks: Hooks,
        average: Average | None,
        clip_norm: float | None,
        backend: Backend,
        model: nn.Module,
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`aside`: makes a context for work that belongs to no step."""
        super().__init__(optimizer, hooks, average, clip_norm, backend)
        self._model, self._aside = model, aside
        self._begun: dict[Place, Tensor] = {}
        self._marks: dict[Place, object] = {}
        self._known: set[nn.Parameter] = set()
        # Whether the last step has changed what the device cannot undo.
        self._waits = False

    def begins(self) -> None:
        buffers = self._buffers()
        if not buffers or self._backend.device.type != "xla":
            self._begun = _copies(buffers)
            return
        with self._aside():
            # Pending work of hooks must be computed before its result can have a mark.
            self._backend.sync()
            self._begun = _copies(buffers)
            # A separate program, for the reason in `_parts`. It begins once all earlier work is done.
            self._backend.sync()
        self._marks = self._marks_of(buffers)

    def passed(self) -> None:
        # Only a buffer that no pass has written to keeps its mark. Later a new value might get an old mark.
        now = self._marks_of({place: buffer for place, buffer in self._buffers().items() if place in self._marks})
        self._marks = {place: mark for place, mark in self._marks.items() if now.get(place) == mark}

    def make(self, parameters: Sequence[nn.Parameter], sums: Sums) -> None:
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        finite = sums.finite(self._backend)
        if self._must_wait(trained):
            if self._read(finite):
                _, before = self._parts(trained)
                super().make(parameters, sums)
                _, now = self._parts(trained)
                self._waits = now != before
                self._known.update(trained)
            else:
                self._put_back(*self._written())
            return
        with torch.no_grad():
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad = torch.where(finite, parameter.grad, torch.zeros_like(parameter.grad))
        changing, rest = self._parts(trained)
        copies = _copies(changing)
        if self._backend.reads_free:
            # A divided step sends off a program, which would have the copies among its results: see `_parts`.
            with self._aside():
                self._backend.sync()
        super().make(parameters, sums)
        changed, rest_now = self._parts(trained)
        self._waits = rest_now != rest
        buffers, begun = self._written()
        now, before = buffers | changed, begun | copies
        if self._waits or _shapes(now) != _shapes(before):
            # Waits here: this is rare, and most steps are finite.
            if not self._read(finite):
                raise self._lasting()
            return
        self._put_back(now, {place: torch.where(finite, tensor, before[place]) for place, tensor in now.items()})

    def _must_wait(self, trained: Sequence[nn.Parameter]) -> bool:
        """Returns whether the host must know that the step is finite before it makes it."""
        if self._backend.device.type == "cpu" or self._waits or not self._known.issuperset(trained):
            return True
        return self._average is not None and self._average.grows

    def _read(self, finite: Tensor) -> bool:
        with self._aside():
            # Everything pending, not only this value, or the passes that it depends on would run a second time.
            self._backend.sync()
            (here,) = self._backend.to_host([finite])
        return bool(here)

    def _put_back(self, tensors: Mapping[Place, Tensor], values: Mapping[Place, Tensor]) -> None:
        if _shapes(tensors) != _shapes(values):
            raise self._lasting()
        with torch.no_grad():
            for place, value in values.items():
                tensors[place].copy_(value)

    def _lasting(self) -> UserCodeError:
        return UserCodeError(
            "recipe.onNotFinite: Skip cannot undo a step that is not finite: it has changed which tensors the model's "
            f"buffers or the state of {type(self._optimizer).__name__} consist of; use Stop or Warn"
        )

    def _buffers(self) -> dict[Place, Tensor]:
        # By name, since a forward pass may replace a buffer's tensor.
        return {("buffer", name): buffer for name, buffer in self._model.named_buffers()}

    def _written(self) -> tuple[dict[Place, Tensor], dict[Place, Tensor]]:
        """Returns the buffers that the step has written to, and their values when it began."""
        self.passed()
        now, begun = (
            {place: tensor for place, tensor in tensors.items() if place not in self._marks}
            for tensors in (self._buffers(), self._begun)
        )
        self._begun, self._marks = {}, {}
        return now, begun

    def _marks_of(self, tensors: Mapping[Place, Tensor]) -> dict[Place, object]:
        return dict(zip(tensors, self._backend.marks(list(tensors.values())), strict=True))

    def _parts(self, trained: Sequence[nn.Parameter]) -> tuple[dict[Place, Tensor], dict[Place, Any]]:
        """Returns the tensors that a step changes on the device, by place, and the values that the device cannot undo
        if a step changes them: the optimizer's numbers on the host, in its state and its groups, and the state of
        parameters without a gradient, by torch's count of the writes to it.

        Tensors that a step leaves alone are not among them: selecting old or new values of those, too, would make
        programs that differ only in which of two tensors of one shape they read where, and torch_xla 2.9 mistakes
        one such program for the other.
        """
        groups = self._optimizer.param_groups
        resting = {id(parameter) for group in groups for parameter in group["params"]}
        resting.difference_update(map(id, trained))
        changed: dict[Place, Tensor] = {("parameter", id(parameter)): parameter for parameter in trained}
        if self._average is not None:
            changed |= {("average", name): tensor for name, tensor in self._average.tensors.items()}
        # Without the rate, which the trainer sets.
        options = [{key: value for key, value in group.items() if key not in ("params", "lr")} for group in groups]
        rest: dict[Place, Any] = {}
        for place, value in (*self._state(), *_leaves(options)):
            if isinstance(value, int | float):
                rest[place] = value
            elif isinstance(value, Tensor) and value.device.type != self._backend.device.type:
                rest[place] = value.item() if value.numel() == 1 else value._version
            elif isinstance(value, Tensor) and place[0] in resting:
                rest[place] = value._version
            elif isinstance(value, Tensor):
                changed[place] = value
        return changed, rest

    def _state(self) -> Iterator[tuple[Place, Any]]:
        # By owner and not by order: a divided optimizer moves state that it has updated to the end.
        for owner, state in self._optimizer.state.items():
            yield from _leaves(state, (id(owner),))


class Passes:
    """Adds up the gradients of 16-bit parameters in float32 over the passes of a step, except the last one.

    Autograd adds gradients in the parameter's type, and in bfloat16 a sum over 64 passes is off by a percent. Takes 4
    bytes for each of their elements. Call `keep` between two passes, and `take` after the last one, whose gradients
    stay with the parameters. `measures`: does so for all parameters, and measures each pass's own gradient.
    """

    def __init__(self, model: nn.Module, count: int, *, measures: bool) -> None:
        self._kept = [parameter for parameter in model.parameters() if measures or parameter.dtype.itemsize < 4]
        self._count, self.measures = count, measures
        self._square: Tensor | None = None
        self._sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def measure(self, parameters: Sequence[nn.Parameter], loss: Loss) -> None:
        """Measures a pass's gradient, which the parameters have. `loss`: the pass's part of the step's."""
        squared = square([parameter.grad for parameter in parameters if parameter.grad is not None], loss.total)
        # The gradient of the pass's own mean, of which the step's loss has the sum or the `count`th part.
        squared = squared * self._count if loss.weight is None else squared / (loss.weight.square() * self._count)
        self._square = squared if self._square is None else self._square + squared

    def take_square(self) -> Tensor | None:
        """Returns the mean over the passes of the squared length of their own gradients; None if it is not measured."""
        found, self._square = self._square, None
        return found

    @torch.no_grad()
    def keep(self) -> None:
        for parameter in self._kept:
            if parameter.grad is None:
                continue
            gradient, parameter.grad = as_real(widen(parameter.grad)), None
            if parameter in self._sums:
                call_in_place(Tensor.add_, (self._sums[parameter], gradient), {})
            else:
                self._sums[parameter] = gradient

    def take(self) -> Mapping[nn.Parameter, Tensor]:
        """Returns the sums by parameter; the next step begins without any."""
        sums, self._sums = self._sums, {}
        return sums


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scales the exchanged gradients, whose length together is `norm`, so that they are no longer than `limit`.

    Does what torch.nn.utils.clip_grad_norm_ does, but with a length that the exchange has usually measured, and without
    a read from the device. A length that is not finite makes all gradients so.
    """
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            call_in_place(Tensor.mul_, (parameter.grad, factor.to(parameter.grad.dtype)), {})


def count_on_device(optimizer: Optimizer, device: torch.device) -> None:
    """Makes torch's own optimizers keep their step counts on the device, where a skipped step can be undone."""
    if device.type not in ("xla", "cuda", "xpu", "tpu"):
        return
    for options in (optimizer.defaults, *optimizer.param_groups):
        if "capturable" in options:
            options["capturable"] = True


@torch.no_grad()
def _put_in_order(optimizer: Optimizer) -> None:
    """Replaces the state's tensors by copies, which are made in the order of the parameters.

    torch_xla 2.9 takes two programs for one if they differ only in which of two tensors of one shape they read where. A
    program returns tensors in the order in which they were made. Experts of one shape that take turns would get each
    other's state if it had another order than they, such as that in which each was trained first.
    """
    from tpu_trainer.gang.backends.program import number_of

    owners = [owner for owner in optimizer.state if isinstance(owner, Tensor) and owner.device.type == "xla"]
    for owner in sorted(owners, key=number_of):
        state = optimizer.state[owner]
        here = {key: each for key, each in state.items() if isinstance(each, Tensor) and each.device.type == "xla"}
        state.update({key: each.clone() for key, each in here.items()})


def _copies(tensors: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    return {place: tensor.detach().clone() for place, tensor in tensors.items()}


def _shapes(tensors: Mapping[Place, Tensor]) -> dict[Place, torch.Size]:
    return {place: tensor.shape for place, tensor in tensors.items()}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Returns all tensors in nested mappings, lists and tuples."""
    return (leaf for _, leaf in _leaves(value) if isinstance(leaf, Tensor))


def _leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yields all values in nested mappings, lists and tuples, each with the keys that lead to it."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, (*place, key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _leaves(part, (*place, number))
    else:
        yield place, value


def _precise(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if kind in (torch.bfloat16, torch.float16) else kind
