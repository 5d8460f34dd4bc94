"""`validation_step` over the held-out set, and metric objects: what they say over all batches and processes.

A mean over the examples does not depend on how they were divided among processes, since every batch counts by its rows.
Metric objects are torchmetrics', known by their attributes: each names for its states how the processes' values become
one. That is done here with the trainer's own collectives, because torchmetrics' know only the process group's device.
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
from tpu_trainer.lightning.session import Metric, Session, is_metric, kind_of
from tpu_trainer.task.task import Batch

_KINDS = {"dim_zero_sum": "sum", "dim_zero_mean": "mean", "dim_zero_min": "min", "dim_zero_max": "max"}
"""torchmetrics' reduction functions, by name."""

_DIGIT = 2**12
"""Counts travel as three digits: sums over up to 4096 processes are exact in float32, for counts up to 2**36."""

_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass
class _Logged:
    """One name's values: for a mean, the sum of value x weight and the sum of weights; for a sum, the sum."""

    kind: str
    total: Tensor | float = 0.0
    weight: float = 0.0


class Validation:
    """A task's `evaluator`, and the log's collector from `begins` to `ends`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._values: dict[str, _Logged] = {}
        self._objects: dict[str, Metric] = {}
        self._before: list[Snapshot] = []
        self._rows = 0
        self._total_rows = 0
        self._lengths: dict[str, int] = {}
        self._at_end = False
        self._own: set[str] = set()

    def begins(self) -> None:
        session = self._session
        self._values, self._objects, self._total_rows = {}, {}, 0
        self._at_end, self._own = False, set()
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
        batch = session.received(batch)
        session.call("on_validation_batch_start", batch, index)
        outputs = session.step("validation_step", batch, index)
        session.call("on_validation_batch_end", outputs, batch, index)

    def add(
        self, name: str, value: Tensor | float | Metric, reduce_fx: Any, weight: float | None, *, meant: bool
    ) -> None:
        """`weight`: the batch size given to `self.log`; without it, the batch's examples."""
        if name == "loss":
            raise UserCodeError('the name "loss" is the training loss; log it as "val_loss"')
        if is_metric(value):
            self._objects[name] = value
            return
        assert isinstance(value, Tensor | int | float)
        kind = kind_of(name, reduce_fx)
        if self._at_end and not meant:
            self._own.add(name)
        weight = float(self._rows if weight is None else weight)
        if self._rows == 0:
            # A process without examples logs what the others log, with weight 0. The value, too: NaN x 0 is NaN.
            value, weight = 0.0, 0.0
        number = value.reshape(()).float() if isinstance(value, Tensor) else float(value)
        logged = self._values.setdefault(name, _Logged(kind))
        logged.total = logged.total + (number * weight if kind == "mean" else number)
        logged.weight += weight

    def ends(self, backend: Backend) -> dict[str, float]:
        session = self._session
        updated = [entry for entry in self._before if entry[0]._update_count != entry[1]]
        local = self._put_together(updated, backend)
        # Values logged from here on count for all of this process's examples.
        self._rows, self._at_end = self._total_rows, True
        grown = any(length > self._lengths.get(name, 0) for name, length in self._lists().items())
        session.call("on_validation_epoch_end")
        result = self._read(backend, collected=grown and not updated)
        session.view.callback_metrics.update({name: torch.tensor(value) for name, value in result.items()})
        session.call("on_validation_end")
        self._give_back(local)
        session.log.collector = None
        session.view.validating, session.view.training = False, not session.trained
        session.call("on_validation_model_train")
        return result

    def _put_together(self, updated: Sequence[Snapshot], backend: Backend) -> list[tuple[Metric, dict[str, Any]]]:
        """Gives every updated metric its states over all processes; returns this process's own."""
        metrics = [metric for metric, _, _ in updated]
        self._agree([*self._described(), *described(metrics)], backend)
        if self._total_rows == 0:
            for metric, _, before in updated:
                put(metric, before)
        local = [(metric, states(metric)) for metric in metrics]
        if metrics and backend.terms > 1:
            for metric, values in zip(metrics, reduced(metrics, backend), strict=True):
                put(metric, values)
        return local

    def _lists(self) -> dict[str, int]:
        """Returns the lengths of the lists that the module has."""
        return {name: len(value) for name, value in vars(self._session.module).items() if isinstance(value, list)}

    def _read(self, backend: Backend, *, collected: bool) -> dict[str, float]:
        """`collected`: the module has put its outputs into lists, of its process alone."""
        self._agree(self._described(), backend)
        result: dict[str, float] = {}
        if self._values:
            logged = list(self._values.values())
            # As data: a number that happens to be 0 or 1 would become a constant of the program, and this process would
            # run a program of its own.
            totals = backend.to_host([torch.as_tensor(one.total, dtype=torch.float32) for one in logged])
            row = torch.tensor([*(float(total) for total in totals), *(one.weight for one in logged)])
            _, sums = backend.reduce([], backend.to_device(row))
            (found,) = backend.to_host([sums])
            numbers = found.tolist()
            own = {
                name: float(total) / (one.weight or 1 if one.kind == "mean" else 1)
                for (name, one), total in zip(self._values.items(), totals, strict=True)
                if name in self._own
            }
            self._remark(own, backend, collected=collected)
            for name, one, total, weight in zip(
                self._values, logged, numbers[: len(logged)], numbers[len(logged) :], strict=True
            ):
                result[name] = total if one.kind == "sum" else total / weight if weight else math.nan
        for name, metric in self._objects.items():
            with user_code(f'compute() of the metric logged as "{name}"'):
                result[name] = _number(name, metric.compute())
        return result

    def _remark(self, own: Mapping[str, float], backend: Backend, *, collected: bool) -> None:
        """Remarks once which numbers depend on the processes. `own`: plain ones of on_validation_epoch_end."""
        session = self._session
        if not own or backend.terms == 1 or session.view.sanity_checking:
            return
        names = differing(own, backend, counts=self._total_rows > 0) or (list(own) if collected else [])
        if names and not session.remarks:
            session.remarks.append(of_own_part(names))

    def _give_back(self, local: Sequence[tuple[Metric, dict[str, Any]]]) -> None:
        """Resets logged metrics, as Lightning does; gives those that go on counting this process's part back."""
        for metric, own in local:
            if metric._update_count > 0:
                put(metric, own)
        for metric in self._objects.values():
            metric.reset()

    def _described(self) -> list[str]:
        values = [f"{name} ({one.kind})" for name, one in self._values.items()]
        return [*values, *(f"{name} ({type(metric).__name__})" for name, metric in self._objects.items())]

    def _agree(self, texts: Sequence[str], backend: Backend) -> None:
        """Raises UserCodeError if processes log different things: their collectives would not match."""
        # 24 bits, all that float32 holds exactly.
        own = float(zlib.crc32("\n".join(texts).encode()) % 2**24)
        rows = [row[0] for row in backend.gather([own])]
        if len(set(rows)) > 1:
            raise UserCodeError(
                "validation_step: the processes do not all log the same names in the same order; process "
                f"{backend.rank} logs {', '.join(texts) or 'nothing'}. self.log must not depend on the rank or the data"
            )


def differing(own: Mapping[str, float], backend: Backend, *, counts: bool = True) -> list[str]:
    """Returns the names whose numbers differ between the processes; a collective, in which all have the same names.
    `counts`: this process has examples, and so numbers."""
    rows = [row[1:] for row in backend.gather([float(counts), *own.values()]) if row[0]]
    return [
        name
        for name, values in zip(own, zip(*rows, strict=True), strict=True)
        if not np.allclose(values, values[0], rtol=1e-5, equal_nan=True)
    ]


def of_own_part(names: Sequence[str]) -> str:
    return (
        f"on_validation_epoch_end logs numbers that each process has computed from its own part of the held-out data: "
        f"{', '.join(names)}. Their mean is shown and followed, which depends on the number of processes. A metric of "
        "torchmetrics covers the examples of all, as do outputs gathered with self.all_gather; sync_dist=True says "
        "that the mean is meant"
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    shape = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UserCodeError(f'self.log("{name}"): its metric computes a value {shape}; a single number is needed')


def metrics_of(module: nn.Module) -> list[Metric]:
    """The metric objects among the submodules, in the module's order, which is the same in every process."""
    return [child for child in module.modules() if is_metric(child)]


def without_own_collectives(metrics: Sequence[Metric]) -> None:
    """Keeps torchmetrics from gathering states by itself, over the trainer's process group, in `compute`."""
    for metric in metrics:
        vars(metric).update(sync_on_compute=False, dist_sync_on_step=False, _to_sync=False)


def states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def put(metric: Metric, values: dict[str, Any]) -> None:
    """Replaces the states, and forgets what was computed from the old ones."""
    for name, value in values.items():
        setattr(metric, name, value)
    metric._computed = None


Snapshot = tuple[Metric, int, dict[str, Any]]
"""A metric, how often it had been updated, and its states at that time."""


def snapshots(module: nn.Module) -> list[Snapshot]:
    """Of all metrics of the module. Copies, since updates are in place."""
    return [
        (metric, metric._update_count, {name: _copy(value) for name, value in states(metric).items()})
        for metric in metrics_of(module)
    ]


def give_back(taken: Sequence[Snapshot]) -> None:
    """Restores the metrics."""
    for metric, count, values in taken:
        put(metric, values)
        metric._update_count = count


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def described(metrics: Sequence[Metric]) -> Iterator[str]:
    """One text per state, equal in all processes if and only if their states can be reduced.

    Raises:
        NeedsTrainerError: a state is a list of all values seen, or has a reduction of its own.
    """
    for metric in metrics:
        for name, reduction in metric._reductions.items():
            value, kind = getattr(metric, name), _KINDS.get(getattr(reduction, "__name__", ""))
            if kind is None or not isinstance(value, Tensor):
                held = "a list of values" if isinstance(value, list) else "a state"
                raise NeedsTrainerError(
                    f"the metric {type(metric).__name__} keeps {held} in {name} that is not a sum, mean, min or max"
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
    # By way of the host, as data: a state that was reset is a constant of the program, which would then differ from the
    # other processes'; and nothing that all must run together may be pending when the module's hooks go on.
    here = backend.to_host([part for each in parts for part in each])
    sums, _ = backend.reduce(backend.to_device(here), backend.to_device(torch.zeros(1)))
    found = iter(backend.to_host(sums))
    for (index, name, kind, value), own in zip(added, parts, strict=True):
        total = _from_digits([next(found) for _ in own]) if value.dtype in _COUNTS else next(found)
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


def _from_digits(digits: Sequence[Tensor]) -> Tensor:
    low, middle, high = (digit.round().long() for digit in digits)
    return low + _DIGIT * middle + _DIGIT**2 * high
