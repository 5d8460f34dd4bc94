"""`validation_step` over the held-out set: what it logs, put together over all batches and processes.

Made by `module`, called by `evaluate`. A mean over the examples does not depend on how they were shared out, since
every batch counts by its rows; nor do metric objects, whose states are put together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpu_trainer.backends.base import Backend
from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.lightning.metrics import (
    Metric,
    Snapshot,
    described,
    is_metric,
    put,
    reduced,
    snapshots,
    states,
)
from tpu_trainer.lightning.session import Session
from tpu_trainer.task import Batch

_FUNCTIONS = {"mean": "mean", "sum": "sum", torch.mean: "mean", torch.sum: "sum"}


@dataclass
class _Logged:
    """One name's values: for a mean the sum of value x weight and the sum of weights, for a sum the sum."""

    kind: str
    total: Tensor | float = 0.0
    weight: float = 0.0


class Validation:
    """A task's `evaluator`. It is the log's collector from `begins` to `ends`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._values: dict[str, _Logged] = {}
        self._objects: dict[str, Metric] = {}
        self._before: list[Snapshot] = []
        self._rows = 0
        self._total_rows = 0

    def begins(self) -> None:
        session = self._session
        self._values, self._objects, self._total_rows = {}, {}, 0
        session.view.training, session.view.validating = False, not session.view.sanity_checking
        session.log.collector = self
        session.call("on_validation_model_eval")
        session.call("on_validation_start")
        session.call("on_validation_epoch_start")
        # After the hooks: these are where modules reset their metrics.
        self._before = snapshots(session.module)

    def batch(self, batch: Batch, index: int, rows: int) -> None:
        session, self._rows = self._session, rows
        self._total_rows += rows
        batch = session.received(batch)
        session.call("on_validation_batch_start", batch, index)
        outputs = session.step("validation_step", batch, index)
        session.call("on_validation_batch_end", outputs, batch, index)

    def add(self, name: str, value: Tensor | float | Metric, reduce_fx: Any, weight: float | None) -> None:
        """`weight`: the batch size given to `self.log`; left out, the batch's examples."""
        if name == "loss":
            raise UserCodeError('the name "loss" is taken by the training loss; log it as "val_loss"')
        if is_metric(value):
            self._objects[name] = value
            return
        assert isinstance(value, Tensor | int | float)
        kind = _FUNCTIONS.get(reduce_fx)
        if kind is None:
            given = getattr(reduce_fx, "__name__", reduce_fx)
            raise UserCodeError(
                f'self.log("{name}"): reduce_fx {given} is not served in an evaluation; mean and sum are'
            )
        weight = float(self._rows if weight is None else weight)
        if self._rows == 0:
            # A process without examples logs what the others log, and it counts nothing; a value times 0 may be NaN.
            value, weight = 0.0, 0.0
        number = value.reshape(()).float() if isinstance(value, Tensor) else float(value)
        logged = self._values.setdefault(name, _Logged(kind))
        logged.total = logged.total + (number * weight if kind == "mean" else number)
        logged.weight += weight

    def ends(self, backend: Backend) -> dict[str, float]:
        session = self._session
        updated = [entry for entry in self._before if entry[0]._update_count != entry[1]]
        local = self._put_together(updated, backend)
        # What is logged from here on is made of values that count for all of this process's examples.
        self._rows = self._total_rows
        session.call("on_validation_epoch_end")
        result = self._read(backend)
        session.view.callback_metrics.update({name: torch.tensor(value) for name, value in result.items()})
        session.call("on_validation_end")
        self._give_back(local)
        session.log.collector = None
        session.view.validating, session.view.training = False, not session.trained
        session.call("on_validation_model_train")
        if session.trained:
            session.finish()
        return result

    def _put_together(self, updated: Sequence[Snapshot], backend: Backend) -> list[tuple[Metric, dict[str, Any]]]:
        """Gives every metric updated here its states over all processes; returns the states of this process."""
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

    def _read(self, backend: Backend) -> dict[str, float]:
        self._agree(self._described(), backend)
        result: dict[str, float] = {}
        if self._values:
            logged = list(self._values.values())
            # As data: a number that happens to be 0 or 1 would be compiled in, and this process would run a program of
            # its own.
            totals = backend.to_host([torch.as_tensor(one.total, dtype=torch.float32) for one in logged])
            row = torch.tensor([*(float(total) for total in totals), *(one.weight for one in logged)])
            _, sums = backend.reduce_bucket([], backend.to_device(row))
            (found,) = backend.to_host([sums])
            numbers = found.tolist()
            for name, one, total, weight in zip(
                self._values, logged, numbers[: len(logged)], numbers[len(logged) :], strict=True
            ):
                result[name] = total if one.kind == "sum" else total / weight if weight else math.nan
        for name, metric in self._objects.items():
            with user_code(f'compute() of the metric logged as "{name}"'):
                result[name] = _number(name, metric.compute())
        return result

    def _give_back(self, local: Sequence[tuple[Metric, dict[str, Any]]]) -> None:
        """A logged metric begins anew, as Lightning has it; one that goes on counting has this process's part again."""
        for metric, own in local:
            if metric._update_count > 0:
                put(metric, own)
        for metric in self._objects.values():
            metric.reset()

    def _described(self) -> list[str]:
        values = [f"{name} ({one.kind})" for name, one in self._values.items()]
        return [*values, *(f"{name} ({type(metric).__name__})" for name, metric in self._objects.items())]

    def _agree(self, texts: Sequence[str], backend: Backend) -> None:
        """Raises UserCodeError where processes log different things: their collectives would not fit together."""
        # 24 bits of it, which is what a float32 keeps.
        own = float(zlib.crc32("\n".join(texts).encode()) % 2**24)
        rows = [row[0] for row in backend.gather([own])]
        if len(set(rows)) > 1:
            raise UserCodeError(
                "validation_step: the processes do not all log the same names in the same order; process "
                f"{backend.rank} logs {', '.join(texts) or 'nothing'}. self.log must not depend on the rank or the data"
            )


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    shape = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UserCodeError(f'self.log("{name}"): its metric computes a value {shape}; a single number is needed')
