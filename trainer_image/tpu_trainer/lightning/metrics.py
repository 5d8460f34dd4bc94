"""torchmetrics objects, by duck typing: what their states are over all processes.

A metric of torchmetrics names for each of its states how the processes' values become one; that is done here with the
trainer's own collectives, because those of torchmetrics know no device but the process group's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from tpu_trainer.backends.base import Backend
from tpu_trainer.errors import UserCodeError

_KINDS = {"dim_zero_sum": "sum", "dim_zero_mean": "mean", "dim_zero_min": "min", "dim_zero_max": "max"}
"""torchmetrics' reduction functions by name."""

_DIGIT = 2**12
"""Counts cross as three digits: sums of up to 4096 processes' digits are exact in float32, counts up to 2**36 too."""

_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@runtime_checkable
class Metric(Protocol):
    """The parts of torchmetrics.Metric that are used here."""

    _defaults: dict[str, Any]
    _reductions: dict[str, Any]
    _update_count: int
    _computed: Any

    def update(self, *args: Any, **kwargs: Any) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


def is_metric(value: Any) -> TypeGuard[Metric]:
    return isinstance(value, Metric)


def metrics_of(module: nn.Module) -> list[Metric]:
    """The metric objects among the submodules, in the module's order, which is the same in every process."""
    return [child for child in module.modules() if is_metric(child)]


def without_own_collectives(metrics: Sequence[Metric]) -> None:
    """Keeps torchmetrics from gathering states in `compute` by itself, over the trainer's process group."""
    for metric in metrics:
        vars(metric).update(sync_on_compute=False, dist_sync_on_step=False, _to_sync=False)


def states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def put(metric: Metric, values: dict[str, Any]) -> None:
    """Replaces the states; what was computed of the old ones is forgotten."""
    for name, value in values.items():
        setattr(metric, name, value)
    metric._computed = None


Snapshot = tuple[Metric, int, dict[str, Any]]
"""A metric, how often it had been updated, and its states then."""


def snapshots(module: nn.Module) -> list[Snapshot]:
    """Of all metrics of the module. Copies, since updates are made in place."""
    return [
        (metric, metric._update_count, {name: _copy(value) for name, value in states(metric).items()})
        for metric in metrics_of(module)
    ]


def give_back(taken: Sequence[Snapshot]) -> None:
    """Makes the metrics what they were when they were taken."""
    for metric, count, values in taken:
        put(metric, values)
        metric._update_count = count


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def described(metrics: Sequence[Metric]) -> Iterator[str]:
    """One text per state, equal in all processes if and only if their states can be put together.

    Raises:
        UserCodeError: a state is a list of all values seen, or has a reduction of its own.
    """
    for metric in metrics:
        for name, reduction in metric._reductions.items():
            value, kind = getattr(metric, name), _KINDS.get(getattr(reduction, "__name__", ""))
            if kind is None or not isinstance(value, Tensor):
                held = "a list of values" if isinstance(value, list) else "a state"
                raise UserCodeError(
                    f"the metric {type(metric).__name__} keeps {held} in {name} that cannot be put together over the "
                    "processes; states reduced by sum, mean, min or max can (curves: give a number of thresholds)"
                )
            yield f"{type(metric).__name__}.{name} {kind} {list(value.shape)}"


def reduced(metrics: Sequence[Metric], backend: Backend) -> list[dict[str, Any]]:
    """Every metric's states over all processes: one collective for sums and means, one for the rest."""
    known = [
        (index, name, _KINDS[reduction.__name__], getattr(metric, name))
        for index, metric in enumerate(metrics)
        for name, reduction in metric._reductions.items()
    ]
    result: list[dict[str, Any]] = [{} for _ in metrics]
    added = [entry for entry in known if entry[2] in ("sum", "mean")]
    parts = [_digits(value) if value.dtype in _COUNTS else [value.float()] for *_, value in added]
    # By way of the host, as data: a state that begins anew is a constant of the program, which would differ from that
    # of the other processes; and nothing that all must run together may be pending when the module's hooks go on.
    here = backend.to_host([part for each in parts for part in each])
    sums, _ = backend.reduce_bucket(backend.to_device(here), backend.to_device(torch.zeros(1)))
    found = iter(backend.to_host(sums))
    for (index, name, kind, value), own in zip(added, parts, strict=True):
        total = _number([next(found) for _ in own]) if value.dtype in _COUNTS else next(found)
        result[index][name] = (total / backend.terms if kind == "mean" else total).to(value.dtype).to(value.device)
    extremes = [entry for entry in known if entry[2] in ("min", "max")]
    if extremes:
        _put_extremes(extremes, backend, result)
    return result


def _put_extremes(
    extremes: Sequence[tuple[int, str, str, Tensor]], backend: Backend, result: list[dict[str, Any]]
) -> None:
    flat = [value.detach().float().reshape(-1).tolist() for *_, value in extremes]
    rows = torch.tensor(backend.gather([number for each in flat for number in each]))
    at = 0
    for (index, name, kind, value), own in zip(extremes, flat, strict=True):
        part = rows[:, at : at + len(own)]
        best = part.amin(dim=0) if kind == "min" else part.amax(dim=0)
        result[index][name] = best.reshape(value.shape).to(value.dtype).to(value.device)
        at += len(own)


def _digits(value: Tensor) -> list[Tensor]:
    whole = value.long()
    digits = [whole % _DIGIT, whole // _DIGIT % _DIGIT, whole // _DIGIT**2]
    return [digit.float() for digit in digits]


def _number(digits: Sequence[Tensor]) -> Tensor:
    low, middle, high = (digit.round().long() for digit in digits)
    return low + _DIGIT * middle + _DIGIT**2 * high
