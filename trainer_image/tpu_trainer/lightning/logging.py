"""`self.log` and `self.log_dict` of a LightningModule: values are kept as they are, on the device, and not read.

Reading one would make every step wait for the device. Bound to the module by `module`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from tpu_trainer.errors import UserCodeError
from tpu_trainer.lightning.metrics import Metric, is_metric


class Collector(Protocol):
    """Takes the values that are logged while it is the log's collector."""

    def add(self, name: str, value: Tensor | float | Metric, reduce_fx: Any, weight: float | None) -> None: ...


class Log:
    """`latest`: the last value of every name. `metrics`: the metric objects logged in training, to be reset at the end
    of the epoch. `collector`: set while an evaluation runs."""

    def __init__(self, latest: dict[str, Any]) -> None:
        self.latest = latest
        self.metrics: list[Metric] = []
        self.collector: Collector | None = None

    def log(
        self,
        name: str,
        value: Any,
        *_: Any,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **__: Any,
    ) -> None:
        """Lightning's `log`. What concerns loggers, progress bars and synchronisation is accepted and means nothing:
        what an evaluation logs is always put together over all processes."""
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UserCodeError(f'self.log("{name}"): a single number is needed, got shape {list(value.shape)}')
            value = self.latest[name] = value.detach()
        elif isinstance(value, int | float):
            self.latest[name] = value
        elif not is_metric(value):
            raise UserCodeError(
                f'self.log("{name}"): a {type(value).__name__} is no number, tensor or metric; several values go to '
                "self.log_dict"
            )
        elif self.collector is None and not any(value is known for known in self.metrics):
            self.metrics.append(value)
        if self.collector is not None and on_epoch is not False:
            self.collector.add(name, value, reduce_fx, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def epoch_ends(self) -> None:
        """As Lightning does, metrics logged in an epoch begin anew in the next."""
        for metric in self.metrics:
            metric.reset()
        self.metrics.clear()
