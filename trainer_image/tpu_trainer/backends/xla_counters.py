"""torch_xla's own metrics as `Counters`. Called by the XLA backends; the doctor reads the result after every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_xla.debug import metrics

from tpu_trainer.backends.base import Counters

_READ_OF_A_NUMBER = "aten::_local_scalar_dense"
"""Counted among the fallbacks by torch_xla, but it is the read itself, and its transfer is counted already."""


class XlaCounters:
    """Leaves out the reads that the backend makes for itself: nobody can act on those."""

    def __init__(self) -> None:
        self._own_reads = 0

    @contextmanager
    def own_reads(self) -> Iterator[None]:
        """Transfers made in the block are the backend's."""
        before = _samples("TransferFromDeviceTime")
        try:
            yield
        finally:
            self._own_reads += _samples("TransferFromDeviceTime") - before

    def read(self) -> Counters:
        compilations, compile_nanoseconds = _metric("CompileTime")
        return Counters(
            compilations=compilations,
            compile_seconds=compile_nanoseconds / 1e9,
            # A program over several devices of one process is counted under a name of its own.
            executions=_samples("ExecuteTime") + _samples("ExecuteReplicatedTime"),
            host_reads=_samples("TransferFromDeviceTime") - self._own_reads,
            fallbacks={
                name: metrics.counter_value(name)
                for name in metrics.counter_names()
                if name.startswith("aten::") and name != _READ_OF_A_NUMBER
            },
        )


def _metric(name: str) -> tuple[int, float]:
    """Samples and their sum; a metric without samples does not exist yet."""
    data = metrics.metric_data(name)
    return (0, 0.0) if data is None else (int(data[0]), float(data[1]))


def _samples(name: str) -> int:
    return _metric(name)[0]
