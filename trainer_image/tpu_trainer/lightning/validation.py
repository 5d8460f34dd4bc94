"""Runs `validation_step` over the held-out set, and reduces what it logs over all processes.

A mean does not depend on how examples are divided among processes, since every batch counts by its rows. Metric objects
are torchmetrics', which gather their states themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.gather import is_shared, pieces
from tpu_trainer.lightning.session import Metric, ModuleSession, is_metric, reduction_of
from tpu_trainer.task.logbook import number_in
from tpu_trainer.task.task import Batch


@dataclass
class _Logged:
    """The values of one name: for a mean, the sums of value x weight and of weights; for a sum, the sum. `is_local`:
    `on_validation_epoch_end` made it of this process's examples."""

    kind: str
    is_local: bool
    total: Tensor | float = 0.0
    weight: float = 0.0

    def value(self, total: float, weight: float) -> float:
        return total if self.kind == "sum" else total / weight if weight else math.nan


class Validation:
    """A task's `evaluator`, and the log's collector from `begins` to `ends`."""

    def __init__(self, session: ModuleSession) -> None:
        self._session = session
        self._values: dict[str, _Logged] = {}
        self._objects: dict[str, Metric] = {}
        self._metrics: list[tuple[Metric, int]] = []
        self._rows = 0
        self._total_rows = 0
        self._at_end = False

    def begins(self) -> None:
        session = self._session
        self._values, self._objects, self._total_rows, self._at_end = {}, {}, 0, False
        session.view.training, session.view.validating = False, not session.view.sanity_checking
        session.log.collector = self.add
        session.call("on_validation_model_eval")
        session.call("on_validation_start")
        session.call("on_validation_epoch_start")
        # After the hooks, in which modules reset their metrics.
        self._metrics = [(metric, metric._update_count) for metric in metrics_of(session.module)]

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
        check_name(name)
        if is_metric(value):
            self._objects[name] = value
            return
        assert isinstance(value, Tensor | int | float)
        kind = reduction_of(name, reduce_fx)
        weight = float(self._rows if weight is None else weight)
        if self._rows == 0:
            # A process without examples logs the same names with weight 0, and value 0, since NaN x 0 is NaN.
            value, weight = 0.0, 0.0
        number = value.reshape(()).float() if isinstance(value, Tensor) else float(value)
        logged = self._values.setdefault(name, _Logged(kind, self._at_end and not sync_dist))
        logged.total = logged.total + (number * weight if kind == "mean" else number)
        logged.weight += weight

    def ends(self, backend: Backend) -> dict[str, float]:
        session = self._session
        if self._total_rows == 0:
            for metric in self._reset_updated():
                # torchmetrics warns of a result without an update.
                metric._update_count = 1
        # Values logged from here on are weighted by all examples of this process.
        self._rows, self._at_end = self._total_rows, True
        with _merged([metric for metric, _ in self._metrics], backend):
            session.call("on_validation_epoch_end")
            result = self._read(backend)
        session.view.callback_metrics.update({name: torch.tensor(value) for name, value in result.items()})
        session.call("on_validation_end")
        for metric in self._objects.values():
            metric.reset()
        if session.view.sanity_checking:
            self._reset_updated()
        session.log.collector = None
        session.view.validating, session.view.training = False, not session.trained
        session.call("on_validation_model_train")
        return result

    def _reset_updated(self) -> list[Metric]:
        """Resets the metrics that this evaluation has updated, with examples that do not count; returns them."""
        updated = [metric for metric, updates in self._metrics if metric._update_count != updates]
        for metric in updated:
            metric.reset()
        return updated

    def _read(self, backend: Backend) -> dict[str, float]:
        """Returns the global number of every name."""
        self._agree(backend)
        result: dict[str, float] = {}
        if self._values:
            logged = list(self._values.values())
            totals = backend.to_host([torch.as_tensor(values.total, dtype=torch.float32) for values in logged])
            row = [*(float(total) for total in totals), *(values.weight for values in logged)]
            # For every process the totals, then the weights.
            rows = np.array(backend.gather(row)).reshape(-1, 2, len(logged))
            for index, (name, values) in enumerate(self._values.items()):
                result[name] = values.value(*rows[:, :, index].sum(axis=0).tolist())
            self._remark(rows)
        for name, metric in self._objects.items():
            with user_code(f'compute() of the metric logged as "{name}"'):
                result[name] = number_in(f'self.log("{name}"): its metric', metric.compute())
        return result

    def _remark(self, rows: np.ndarray[Any, Any]) -> None:
        """Remarks once which numbers of `on_validation_epoch_end` depend on the processes."""
        names = [
            name
            for index, (name, values) in enumerate(self._values.items())
            if values.is_local
            and differ([values.value(total, weight) for total, weight in rows[:, :, index] if weight])
        ]
        if names and not self._session.remarks and not self._session.view.sanity_checking:
            self._session.remarks.append(describe_local_numbers(names))

    def _agree(self, backend: Backend) -> None:
        """Raises UserCodeError if the processes log different names: their collectives would not match."""
        texts = [f"{name} ({values.kind})" for name, values in self._values.items()]
        texts += [f"{name} ({type(metric).__name__})" for name, metric in self._objects.items()]
        if not is_shared("\n".join(texts), backend):
            raise UserCodeError(
                "validation_step: the processes do not all log the same names in the same order; process "
                f"{backend.rank} logs {', '.join(texts) or 'nothing'}. self.log must not depend on the rank or the data"
            )


def check_name(name: str) -> None:
    """Raises UserCodeError for a name under which a validation must not log."""
    if name == "loss":
        raise UserCodeError('the name "loss" is the training loss; log it as "val_loss"')


def differ(numbers: Sequence[float]) -> bool:
    """Returns whether the processes have different numbers."""
    return not np.allclose(numbers, numbers[0], rtol=1e-5, equal_nan=True)


def describe_local_numbers(names: Sequence[str]) -> str:
    return (
        "on_validation_epoch_end logs numbers that each process computes from its own part of the held-out data: "
        f"{', '.join(names)}. Their mean is reported, which depends on the number of processes. Use a metric of "
        "torchmetrics or self.all_gather to cover all examples, or sync_dist=True if the mean is what you want"
    )


def metrics_of(module: nn.Module) -> list[Metric]:
    """Returns the metric objects among the submodules, in an order that is the same in every process."""
    return [child for child in module.modules() if is_metric(child)]


def connect(metrics: Sequence[Metric], backend: Backend) -> None:
    """Makes torchmetrics gather states in `compute` over the gang. Its own collectives know only the process group's
    device, and need a group."""
    for metric in metrics:
        vars(metric).update(
            dist_sync_fn=lambda tensor, group=None: pieces(tensor, backend),
            distributed_available_fn=lambda: backend.terms > 1,
            _computed=None,
        )


def disconnect(metrics: Sequence[Metric]) -> None:
    """Makes each process's metrics cover its own examples."""
    for metric in metrics:
        # bool() is False.
        vars(metric).update(dist_sync_fn=None, distributed_available_fn=bool, _computed=None)


@contextmanager
def _merged(metrics: Sequence[Metric], backend: Backend) -> Iterator[None]:
    """Makes metrics cover the examples of all processes within the block. Elsewhere workers of a loader may have to
    unpickle the module, and with it what its metrics refer to."""
    connect(metrics, backend)
    try:
        yield
    finally:
        disconnect(metrics)
