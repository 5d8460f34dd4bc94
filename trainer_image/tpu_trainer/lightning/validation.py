"""Runs `validation_step` over the held-out set, and reduces logged values and metric objects over all processes.

A mean does not depend on how examples are divided among processes, since every batch counts by its rows. Metric objects
are torchmetrics', recognised by their attributes; each names the reduction of its states. The trainer's own collectives
reduce them, because torchmetrics' know only the process group's device.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.lightning.needs import NeedsTrainerError
from tpu_trainer.lightning.session import Metric, ModuleSession, is_metric, reduction_of
from tpu_trainer.task.task import Batch

_KINDS = {"dim_zero_sum": "sum", "dim_zero_mean": "mean", "dim_zero_min": "min", "dim_zero_max": "max"}
"""torchmetrics' reduction functions, by name."""

_DIGIT = 2**12
"""Counts are sent as three digits, so that sums over 4096 processes are exact in float32, for counts up to 2**36."""

_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass
class _Logged:
    """The values of one name: for a mean, the sums of value x weight and of weights; for a sum, the sum."""

    kind: str
    total: Tensor | float = 0.0
    weight: float = 0.0


class Validation:
    """A task's `evaluator`, and the log's collector from `begins` to `ends`."""

    def __init__(self, session: ModuleSession) -> None:
        self._session = session
        self._values: dict[str, _Logged] = {}
        self._objects: dict[str, Metric] = {}
        self._before: list[MetricSnapshot] = []
        self._rows = 0
        self._total_rows = 0
        self._lengths: dict[str, int] = {}
        self._at_end = False
        self._local: set[str] = set()

    def begins(self) -> None:
        session = self._session
        self._values, self._objects, self._total_rows = {}, {}, 0
        self._at_end, self._local = False, set()
        session.view.training, session.view.validating = False, not session.view.sanity_checking
        session.log.collector = self
        session.call("on_validation_model_eval")
        session.call("on_validation_start")
        session.call("on_validation_epoch_start")
        # After the hooks, in which modules reset their metrics.
        self._before = snapshots(session.module)
        self._lengths = self._lists()

    def batch(self, batch: Batch, index: int, rows: int) -> None:
        session, self._rows = self._session, rows
        self._total_rows += rows
        batch = session.move(batch)
        session.call("on_validation_batch_start", batch, index)
        outputs = session.step("validation_step", batch, index)
        session.call("on_validation_batch_end", outputs, batch, index)

    def add(
        self, name: str, value: Tensor | float | Metric, reduce_fx: Any, weight: float | None, *, sync_dist: bool
    ) -> None:
        """Adds a logged value. `weight`: the batch size given to `self.log`; without one, the examples of the batch."""
        if name == "loss":
            raise UserCodeError('the name "loss" is the training loss; log it as "val_loss"')
        if is_metric(value):
            self._objects[name] = value
            return
        assert isinstance(value, Tensor | int | float)
        kind = reduction_of(name, reduce_fx)
        if self._at_end and not sync_dist:
            self._local.add(name)
        weight = float(self._rows if weight is None else weight)
        if self._rows == 0:
            # A process without examples logs the same names with weight 0, and value 0, since NaN x 0 is NaN.
            value, weight = 0.0, 0.0
        number = value.reshape(()).float() if isinstance(value, Tensor) else float(value)
        logged = self._values.setdefault(name, _Logged(kind))
        logged.total = logged.total + (number * weight if kind == "mean" else number)
        logged.weight += weight

    def ends(self, backend: Backend) -> dict[str, float]:
        session = self._session
        updated = [entry for entry in self._before if entry[0]._update_count != entry[1]]
        local = self._reduce_metrics(updated, backend)
        # Values logged from here on are weighted by all examples of this process.
        self._rows, self._at_end = self._total_rows, True
        grown = any(length > self._lengths.get(name, 0) for name, length in self._lists().items())
        session.call("on_validation_epoch_end")
        result = self._read(backend, collected=grown and not updated)
        session.view.callback_metrics.update({name: torch.tensor(value) for name, value in result.items()})
        session.call("on_validation_end")
        self._reset_metrics(local)
        session.log.collector = None
        session.view.validating, session.view.training = False, not session.trained
        session.call("on_validation_model_train")
        return result

    def _reduce_metrics(
        self, updated: Sequence[MetricSnapshot], backend: Backend
    ) -> list[tuple[Metric, dict[str, Any]]]:
        """Replaces each metric's states by the global ones; returns the local states so that they can be put back."""
        metrics = [metric for metric, _, _ in updated]
        self._agree([*self._descriptions(), *describe_states(metrics)], backend)
        if self._total_rows == 0:
            for metric, _, before in updated:
                put(metric, before)
        local = [(metric, states(metric)) for metric in metrics]
        if metrics and backend.terms > 1:
            for metric, values in zip(metrics, reduce_states(metrics, backend), strict=True):
                put(metric, values)
        return local

    def _lists(self) -> dict[str, int]:
        """Returns the lengths of the lists among the module's attributes."""
        return {name: len(value) for name, value in vars(self._session.module).items() if isinstance(value, list)}

    def _read(self, backend: Backend, *, collected: bool) -> dict[str, float]:
        """Returns the global number of every name. `collected`: the module collected outputs of its own process."""
        self._agree(self._descriptions(), backend)
        result: dict[str, float] = {}
        if self._values:
            logged = list(self._values.values())
            # Moved as data: a 0 or 1 would become a constant of the program, which would then differ between processes.
            totals = backend.to_host([torch.as_tensor(values.total, dtype=torch.float32) for values in logged])
            row = torch.tensor([*(float(total) for total in totals), *(values.weight for values in logged)])
            _, sums = backend.reduce([], backend.to_device(row))
            numbers = backend.to_host([sums])[0].tolist()
            local = {
                name: float(total) / (values.weight or 1 if values.kind == "mean" else 1)
                for (name, values), total in zip(self._values.items(), totals, strict=True)
                if name in self._local
            }
            self._remark(local, backend, collected=collected)
            for name, values, total, weight in zip(
                self._values, logged, numbers[: len(logged)], numbers[len(logged) :], strict=True
            ):
                result[name] = total if values.kind == "sum" else total / weight if weight else math.nan
        for name, metric in self._objects.items():
            with user_code(f'compute() of the metric logged as "{name}"'):
                result[name] = _number(name, metric.compute())
        return result

    def _remark(self, local: Mapping[str, float], backend: Backend, *, collected: bool) -> None:
        """Remarks once which numbers depend on the processes. `local`: numbers that on_validation_epoch_end logged."""
        session = self._session
        if not local or backend.terms == 1 or session.view.sanity_checking:
            return
        names = find_differing(local, backend, counts=self._total_rows > 0) or (list(local) if collected else [])
        if names and not session.remarks:
            session.remarks.append(describe_local_numbers(names))

    def _reset_metrics(self, local: Sequence[tuple[Metric, dict[str, Any]]]) -> None:
        """Resets logged metrics, as Lightning does; gives all others their local states back."""
        for metric, values in local:
            if metric._update_count > 0:
                put(metric, values)
        for metric in self._objects.values():
            metric.reset()

    def _descriptions(self) -> list[str]:
        numbers = [f"{name} ({values.kind})" for name, values in self._values.items()]
        return [*numbers, *(f"{name} ({type(metric).__name__})" for name, metric in self._objects.items())]

    def _agree(self, texts: Sequence[str], backend: Backend) -> None:
        """Raises UserCodeError if the texts of the processes differ: their collectives would not match."""
        # 24 bits are what float32 holds exactly.
        digest = float(zlib.crc32("\n".join(texts).encode()) % 2**24)
        if len({row[0] for row in backend.gather([digest])}) > 1:
            raise UserCodeError(
                "validation_step: the processes do not all log the same names in the same order; process "
                f"{backend.rank} logs {', '.join(texts) or 'nothing'}. self.log must not depend on the rank or the data"
            )


def find_differing(local: Mapping[str, float], backend: Backend, *, counts: bool = True) -> list[str]:
    """Returns the names whose numbers differ between the processes; a collective, to which all bring the same names.
    `counts`: this process has examples, so its numbers count."""
    rows = [row[1:] for row in backend.gather([float(counts), *local.values()]) if row[0]]
    return [
        name
        for name, values in zip(local, zip(*rows, strict=True), strict=True)
        if not np.allclose(values, values[0], rtol=1e-5, equal_nan=True)
    ]


def describe_local_numbers(names: Sequence[str]) -> str:
    return (
        "on_validation_epoch_end logs numbers that each process computes from its own part of the held-out data: "
        f"{', '.join(names)}. Their mean is reported, which depends on the number of processes. Use a metric of "
        "torchmetrics or self.all_gather to cover all examples, or sync_dist=True if the mean is what you want"
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    shape = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UserCodeError(f'self.log("{name}"): its metric computes a value {shape}; a single number is needed')


def metrics_of(module: nn.Module) -> list[Metric]:
    """Returns the metric objects among the submodules, in an order that is the same in every process."""
    return [child for child in module.modules() if is_metric(child)]


def disable_own_collectives(metrics: Sequence[Metric]) -> None:
    """Keeps torchmetrics from gathering states itself in `compute`, over the trainer's process group."""
    for metric in metrics:
        vars(metric).update(sync_on_compute=False, dist_sync_on_step=False, _to_sync=False)


def states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def put(metric: Metric, values: dict[str, Any]) -> None:
    """Replaces the states, and drops the cached result."""
    for name, value in values.items():
        setattr(metric, name, value)
    metric._computed = None


MetricSnapshot = tuple[Metric, int, dict[str, Any]]
"""A metric, its number of updates, and its states at that time."""


def snapshots(module: nn.Module) -> list[MetricSnapshot]:
    """Returns snapshots of all metrics of the module: copies, since updates are in place."""
    return [
        (metric, metric._update_count, {name: _copy(value) for name, value in states(metric).items()})
        for metric in metrics_of(module)
    ]


def restore_metrics(metrics: Sequence[MetricSnapshot]) -> None:
    for metric, count, values in metrics:
        put(metric, values)
        metric._update_count = count


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def describe_states(metrics: Sequence[Metric]) -> Iterator[str]:
    """Yields one text per state; processes whose texts are equal can reduce their states.

    Raises:
        NeedsTrainerError: a state is a list of values, or its reduction is none of the four above.
    """
    for metric in metrics:
        for name, reduction in metric._reductions.items():
            value, kind = getattr(metric, name), _KINDS.get(getattr(reduction, "__name__", ""))
            if kind is None or not isinstance(value, Tensor):
                kept = "a list of values" if isinstance(value, list) else "a state"
                raise NeedsTrainerError(
                    f"the metric {type(metric).__name__} keeps {kept} in {name} that is not a sum, mean, min or max"
                )
            yield f"{type(metric).__name__}.{name} {kind} {list(value.shape)}"


def reduce_states(metrics: Sequence[Metric], backend: Backend) -> list[dict[str, Any]]:
    """Returns every metric's states over all processes: one collective for sums and means, one for the rest."""
    states_by_kind = [
        (index, name, _KINDS[reduction.__name__], getattr(metric, name))
        for index, metric in enumerate(metrics)
        for name, reduction in metric._reductions.items()
    ]
    result: list[dict[str, Any]] = [{} for _ in metrics]
    added = [entry for entry in states_by_kind if entry[2] in ("sum", "mean")]
    parts = [_digits(value) if value.dtype in _COUNTS else [value.float()] for *_, value in added]
    # By way of the host: a state that was reset is a constant of the program, which would then differ between
    # processes; and no collective may be pending when the module's hooks go on.
    local = backend.to_host([digit for digits in parts for digit in digits])
    sums, _ = backend.reduce(backend.to_device(local), backend.to_device(torch.zeros(1)))
    totals = iter(backend.to_host(sums))
    for (index, name, kind, value), digits in zip(added, parts, strict=True):
        total = _from_digits([next(totals) for _ in digits]) if value.dtype in _COUNTS else next(totals)
        result[index][name] = (total / backend.terms if kind == "mean" else total).to(value.dtype).to(value.device)
    extremes = [entry for entry in states_by_kind if entry[2] in ("min", "max")]
    if extremes:
        _put_extremes(extremes, backend, result)
    return result


def _put_extremes(
    extremes: Sequence[tuple[int, str, str, Tensor]], backend: Backend, result: list[dict[str, Any]]
) -> None:
    flat = [value.detach().float().reshape(-1).tolist() for *_, value in extremes]
    rows = torch.tensor(backend.gather([number for numbers in flat for number in numbers]))
    at = 0
    for (index, name, kind, value), numbers in zip(extremes, flat, strict=True):
        part = rows[:, at : at + len(numbers)]
        best = part.amin(dim=0) if kind == "min" else part.amax(dim=0)
        result[index][name] = best.reshape(value.shape).to(value.dtype).to(value.device)
        at += len(numbers)


def _digits(value: Tensor) -> list[Tensor]:
    count = value.long()
    digits = [count % _DIGIT, count // _DIGIT % _DIGIT, count // _DIGIT**2]
    return [digit.float() for digit in digits]


def _from_digits(digits: Sequence[Tensor]) -> Tensor:
    low, middle, high = (digit.round().long() for digit in digits)
    return low + _DIGIT * middle + _DIGIT**2 * high
