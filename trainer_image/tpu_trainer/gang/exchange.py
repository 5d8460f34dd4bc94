"""Everything that replicas exchange in a training step, at once.

An exchange holds the gradients in the model's order, then the signals, then, where replicas may differ in it, which
parameters have a gradient. Reading the summed signals makes the host wait for the device, so `Signals` reads several
steps at once. All replicas read the same sums after the same step, so they decide alike without another exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.gang.backends.base import as_complex, as_real

if TYPE_CHECKING:
    from tpu_trainer.gang.backends.base import Backend

LOSS, WEIGHT, STOP, SAVE, SQUARE = range(5)
"""Indices of the signals. LOSS, WEIGHT: see `Loss`. STOP, SAVE: above 0 if a replica asks to end the run or to save a
checkpoint. SQUARE: the mean of the squared lengths of the replica's own passes' gradients, sent only if measured."""

SIGNALS = 4
"""Number of signals without SQUARE."""

MOST_STEPS = 10
"""The most steps between two readings of the signals, and the steps between two reports."""

STOP_SECONDS = 1.0
"""A request to stop is read within about this time; a step that takes longer is read by itself."""


@dataclass(frozen=True)
class Loss:
    """A replica's part of a step's loss; tensors of shape []. The loss is the sum of totals over the sum of weights.

    weight None: `total` is a mean over the replica's examples, and all replicas weigh the same.
    """

    total: Tensor
    weight: Tensor | None = None

    @staticmethod
    def of(returned: Any, passes: int, device: torch.device) -> Loss:
        """Makes it of what the task's `loss` returned in one of a step's `passes`.

        Raises:
            UserCodeError: it is neither a mean nor (sum, weight), is not on the replica's device, or has a weight that
                `check_weight` refuses.
        """
        if isinstance(returned, tuple) and len(returned) == 2:
            total, weight = returned
            if _is_scalar(total) and _is_scalar(weight):
                check_weight(weight, "the weight of the task's loss")
                return _check_device(device, Loss(widen(total), widen(weight)))
            got = f"({_describe(total)}, {_describe(weight)})"
        elif _is_scalar(returned):
            mean = widen(returned)
            return _check_device(device, Loss(mean / passes if passes > 1 else mean))
        else:
            got = _describe(returned)
        raise UserCodeError(
            "the task's loss must return the mean over the batch as a tensor of shape [], or (sum, weight) as two of "
            f"them; got {got}"
        )

    @property
    def tensors(self) -> list[Tensor]:
        return [self.total] if self.weight is None else [self.total, self.weight]

    @property
    def mean(self) -> Tensor:
        return self.total if self.weight is None else self.total / self.weight

    def plus(self, later: Loss) -> Loss:
        """Adds the loss of the step's next pass."""
        if self.weight is None or later.weight is None:
            if self.weight is not later.weight:
                raise UserCodeError("the task's loss must return a mean in every pass, or (sum, weight) in every pass")
            return Loss(self.total + later.total)
        return Loss(self.total + later.total, self.weight + later.weight)

    def detached(self) -> Loss:
        return Loss(self.total.detach(), None if self.weight is None else self.weight.detach())


@dataclass(frozen=True)
class LoggedRow:
    """What a replica contributes to a step's exchange of logged values. values: on the device, shape [1 + 2k]: above 0
    if the replica has new names, then sum and weight of each of `names`, then zeros up to the table's size."""

    names: tuple[str, ...]
    values: Tensor


class Flags:
    """What a replica may ask of the gang, to stop or to save a checkpoint: rows of `Backend.numbers`, made once, as
    data on the device. Each has a weight of 1 for a loss without one, then STOP and SAVE.

    A flag built inside the step would be a constant of the compiled program, and flags of equal values may be a single
    input of it. In both cases a replica that asks for something would run a different program in that step, and on TPU
    all replicas would wait for each other forever.
    """

    def __init__(self, backend: Backend) -> None:
        asked = [(stop, save) for stop in (False, True) for save in (False, True)]
        self._rows = {each: backend.numbers([1.0, *map(float, each)]) for each in asked}

    def requests(self, *, stop: bool, save: bool) -> Tensor:
        return self._rows[stop, save]


@dataclass(frozen=True)
class Sums:
    """The results of a step's exchange. signals: summed over all replicas: 4, or 5 with SQUARE, then the logged values.

    norm: the length of the global gradient, before any clipping, shape []. square: its square; None unless asked for.
    gain: AdaScale's row, None without it. logged: the names of the logged values, as in `LoggedRow`.
    """

    signals: Tensor
    norm: Tensor
    square: Tensor | None = None
    logged: tuple[str, ...] = ()
    gain: Tensor | None = None

    def squares(self, backend: Backend) -> tuple[Tensor, Tensor]:
        """Returns the squared lengths of a pass's own gradient, as a mean over all passes and replicas, and of the
        global one, on the backend's device. Only if they were asked for."""
        assert self.square is not None
        return _as_data(self.signals[SQUARE], backend) / backend.terms, _as_data(self.square, backend)

    def finite(self, backend: Backend) -> Tensor:
        """Computes whether the step's loss and gradients are finite: a boolean of shape [], on the backend's device.

        A value that is not finite on one replica is not finite in the sum. Gradients above 1e19 count as not finite,
        because their squares are infinite in float32. `StepResults.finite` is the same on the host.
        """
        loss, weight = self.signals[LOSS], self.signals[WEIGHT]
        # An infinite weight divides the gradient to zero, which is finite.
        mean = torch.isfinite(loss) & torch.isfinite(weight) & (weight != 0)
        return _as_data(torch.isfinite(self.norm), backend) & _as_data(mean, backend)


def exchange(
    parameters: Sequence[nn.Parameter],
    loss: Loss,
    requests: Tensor,
    backend: Backend,
    own_square: Tensor | None = None,
    logged: LoggedRow | None = None,
    earlier: Mapping[nn.Parameter, Tensor] | None = None,
) -> Sums:
    """Replaces every gradient by the gradient of the mean loss over all replicas. `requests`: see `Flags`.
    `own_square`: the signal SQUARE, None if it is not measured. `earlier`: gradients of the step's earlier passes that
    are not stored with their parameters. Both come from `Passes`.

    A parameter without a gradient on any replica keeps none, as in plain PyTorch, where optimizers skip it. A parameter
    that only some replicas used gets the same gradient on all.

    After the call only the parameters refer to gradients: one that is still referred to at a sync becomes an output of
    the compiled graph (1x the parameters in memory, a fifth of the speed of a small model).

    Raises:
        UserCodeError: a gradient is sparse.
    """
    alone = backend.terms == 1 or backend.one_program
    earlier = earlier or {}
    used = [parameter.grad is not None or parameter in earlier for parameter in parameters]
    sent = [parameter for parameter, has in zip(parameters, used, strict=True) if has or not alone]
    gradients, signals = take_gradients(sent, loss, requests, own_square, earlier, logged)
    count = len(signals)
    if not alone:
        signals = torch.cat([signals, backend.to_device(torch.tensor(used, dtype=signals.dtype))])
    sums, total = backend.reduce(gradients, signals)
    del gradients
    anywhere = [True] * len(sent)
    # Not needed if this replica has every gradient: most models never wait for this reading.
    if not alone and not all(used):
        anywhere = [has > 0 for has in total[count:].tolist()]
    divisor: int | Tensor = backend.terms
    if loss.weight is not None:
        divisor = _as_data(total[WEIGHT], backend)
    for parameter, summed, has in zip(sent, sums, anywhere, strict=True):
        if has:
            mean = summed if isinstance(divisor, int) and divisor == 1 else summed / divisor
            parameter.grad = as_complex(mean, parameter).to(parameter.dtype)
    # A copy: over gloo a slice of the flat sums would keep all of them alive until it is read.
    signals = total if alone else total[:count].clone()
    with torch.no_grad():
        squared = square([parameter.grad for parameter in parameters if parameter.grad is not None], signals)
    names = () if logged is None else logged.names
    return Sums(signals, squared.sqrt(), None if own_square is None else squared, names)


def take_gradients(
    parameters: Sequence[nn.Parameter],
    loss: Loss,
    requests: Tensor,
    own_square: Tensor | None = None,
    earlier: Mapping[nn.Parameter, Tensor] | None = None,
    logged: LoggedRow | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Takes the gradients off the parameters (zeros where there is none) and adds those of `earlier` passes.

    Returns the gradients and this replica's signals, as real numbers in float32, or in float64 if that is their type.
    """
    gradients = [_travelling(parameter, earlier.get(parameter) if earlier else None) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    kind = torch.float64 if loss.total.dtype == torch.float64 else torch.float32
    # Few operations: each costs as much of the host's time as those of a parameter.
    asked = requests.reshape(-1) if len(requests) == 1 else requests.mean(dim=0)
    signals = [loss.total.detach().reshape(1)]
    signals += [asked] if loss.weight is None else [loss.weight.detach().reshape(1), asked[1:]]
    signals += [] if own_square is None else [own_square.reshape(1)]
    signals += [] if logged is None else [logged.values]
    return gradients, torch.cat([signal.to(kind) for signal in signals])


def square(gradients: Sequence[Tensor], default: Tensor) -> Tensor:
    """Returns the squared length of all gradients together, in float32, shape []; without any, 0 on `default`'s device.

    Written as products, because torch_xla turns vector_norm and square into powers.
    """
    if not gradients:
        return default.new_zeros((), dtype=torch.float32)
    reals = [widen(as_real(gradient)) for gradient in gradients]
    return torch.stack([(real * real).sum().float() for real in reals]).sum()


def widen(value: Tensor) -> Tensor:
    """Returns `value` in float32 or float64, so that passes add up: True + True is True, and float16 ends at 65504."""
    return value if value.dtype == torch.float64 or value.is_complex() else value.float()


@dataclass(frozen=True)
class StepResults:
    """The signals of one or more steps, on the host.

    losses: the global loss of each step. norms: the length of its global gradient, before any clipping. finite: whether
    its loss and gradients are finite. stopping, saving: in one of the steps a replica asked to end the run, or for a
    checkpoint. squares: per step, the mean over all passes of their own squared gradient, and the square of the global
    gradient; empty unless it is measured. logged: per step, the logged names and their sums. gains: per step,
    AdaScale's row; empty without it.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    finite: tuple[bool, ...]
    stopping: bool = False
    saving: bool = False
    squares: tuple[tuple[float, float], ...] = ()
    logged: tuple[tuple[tuple[str, ...], tuple[float, ...]], ...] = ()
    gains: tuple[tuple[float, ...], ...] = ()

    def then(self, later: StepResults) -> StepResults:
        return StepResults(
            self.losses + later.losses,
            self.norms + later.norms,
            self.finite + later.finite,
            self.stopping or later.stopping,
            self.saving or later.saving,
            self.squares + later.squares,
            self.logged + later.logged,
            self.gains + later.gains,
        )


class Signals:
    """The signals that have not been read yet. `read_through` is the last step that was read.

    Where the device lags behind the host, a reading leaves out the newest step: the next one is traced while its
    results are being computed.
    """

    def __init__(self, backend: Backend, step: int) -> None:
        self._backend = backend
        self._unread: list[Sums] = []
        # Read every step until the pace is known: a request to stop may have waited for the first steps to compile.
        self._every = 1
        self.read_through = step

    def add(self, sums: Sums) -> None:
        self._unread.append(sums)

    def settle_interval(self, step_seconds: float) -> None:
        """Sets how often signals are read, by the slowest replica's pace. A collective."""
        if not self._backend.reads_free:
            slowest = max(seconds for (seconds,) in self._backend.gather([step_seconds]))
            self._every = max(1, min(MOST_STEPS, int(STOP_SECONDS / max(slowest, 1e-9))))

    def read(self, step: int, *, all_steps: bool) -> StepResults | None:
        """Waits for the results if they are due after `step`, or with `all_steps`, for the results of all steps.

        Returns None if there is nothing to read. Results that stop the run or ask for a checkpoint cover all steps.
        """
        if not all_steps and step % self._every:
            return None
        unfinished = 0 if all_steps or self._backend.reads_free else 1
        count = len(self._unread) - unfinished
        if count < 1:
            return None
        results = self._take(count)
        rest = self._take(unfinished) if (results.stopping or results.saving) and unfinished else None
        return results if rest is None else results.then(rest)

    def _take(self, count: int) -> StepResults:
        """Reads the `count` oldest steps."""
        steps = self._unread[:count]
        squares = [sums.square for sums in steps if sums.square is not None]
        gains = [sums.gain for sums in steps if sums.gain is not None]
        rest = SIGNALS + bool(squares)
        own = [*(sums.signals for sums in steps), *(sums.norm for sums in steps)]
        here = self._backend.to_host([*own, *squares, *gains])
        del self._unread[:count]
        self.read_through += count
        rows = [tensor.tolist() for tensor in here[:count]]
        losses = tuple(
            row[LOSS] / row[WEIGHT] if row[WEIGHT] and math.isfinite(row[WEIGHT]) else math.nan for row in rows
        )
        norms = tuple(float(norm) for norm in here[count : 2 * count])
        return StepResults(
            losses=losses,
            norms=norms,
            finite=tuple(math.isfinite(loss) and math.isfinite(norm) for loss, norm in zip(losses, norms, strict=True)),
            stopping=any(row[STOP] > 0 for row in rows),
            saving=any(row[SAVE] > 0 for row in rows),
            squares=tuple(
                (row[SQUARE] / self._backend.terms, float(square))
                for row, square in zip(rows, here[len(own) : len(own) + len(squares)], strict=False)
            ),
            gains=tuple(tuple(row.tolist()) for row in here[len(own) + len(squares) :]),
            logged=tuple((sums.logged, tuple(row[rest:])) for sums, row in zip(steps, rows, strict=True) if row[rest:]),
        )


def _as_data(value: Tensor, backend: Backend) -> Tensor:
    """Returns the value on the device, even if the sums went through host memory: a host number would be compiled
    in."""
    return value if value.device.type == backend.device.type else backend.to_device(value)


def _travelling(parameter: nn.Parameter, earlier: Tensor | None) -> Tensor:
    if parameter.grad is None and earlier is not None:
        return earlier
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if gradient.layout is not torch.strided:
        raise UserCodeError(
            f"the gradient of a parameter of shape {list(parameter.shape)} is sparse; replicas exchange dense "
            "gradients only: create its layer without sparse=True"
        )
    # Detached only if necessary: a sync leaves out an alias that nothing has used yet, and reading it later runs a
    # separate program.
    real = as_real(gradient.detach() if gradient.requires_grad else gradient)
    real = real if real.dtype == torch.float64 else real.float()
    return real if earlier is None else real + earlier


def check_weight(weight: Tensor, what: str) -> None:
    """Raises UserCodeError if the weight depends on the model. The gradient would then have a second term, which needs
    the sums of all replicas before the backward pass."""
    if weight.requires_grad:
        raise UserCodeError(
            f"{what} requires a gradient, but the trainer treats the sum of all weights as a constant: return "
            "weight.detach() if it is one; otherwise return only the mean over the batch, sum / weight"
        )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _check_device(device: torch.device, loss: Loss) -> Loss:
    """Returns the loss; raises UserCodeError if it is on another device."""
    for name, tensor in zip(("the task's loss", "the weight of the task's loss"), loss.tensors, strict=False):
        if tensor.device.type != device.type:
            raise UserCodeError(
                f"{name} is on {tensor.device}, and the model and the batch are on {device}: compute it from "
                "tensors on that device, such as losses.sum() and mask.sum(), without .cpu() and torch.tensor(number)"
            )
    return loss


def _describe(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
