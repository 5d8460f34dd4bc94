"""torch_xla's own metrics as `Counters`. Called by the XLA backends, for the doctor.

A metric keeps its last 1024 samples and hands all of them over (50 microseconds); a counter is one number (0.3). So
what is asked in every step is taken from counters.
"""

from __future__ import annotations

from torch_xla.debug import metrics

from tpu_trainer.backends.base import Counters

_READ_OF_A_NUMBER = "aten::_local_scalar_dense"
"""Counted among the fallbacks by torch_xla, but it is the read itself, and its transfer is counted already."""


class XlaCounters:
    """Leaves out the reads that the backend makes for itself: nobody can act on those."""

    def __init__(self) -> None:
        self._own_reads = 0

    def own_read(self) -> None:
        """The backend makes one transfer from the device."""
        self._own_reads += 1

    def compilations(self) -> int:
        return _counter("UncachedCompile")

    def read(self) -> Counters:
        _, compile_nanoseconds = _metric("CompileTime")
        reads, _ = _metric("TransferFromDeviceTime")
        return Counters(
            compilations=self.compilations(),
            compile_seconds=compile_nanoseconds / 1e9,
            # A program over several devices of one process is counted under a name of its own.
            executions=_counter("ExecuteComputation") + _counter("ExecuteReplicated"),
            host_reads=reads - self._own_reads,
            fallbacks={name: _counter(name) for name in metrics.executed_fallback_ops() if name != _READ_OF_A_NUMBER},
        )


def _metric(name: str) -> tuple[int, float]:
    """Samples and their sum; a metric without samples does not exist yet."""
    data = metrics.metric_data(name)
    return (0, 0.0) if data is None else (int(data[0]), float(data[1]))


def _counter(name: str) -> int:
    """0 for one that has never been counted up."""
    return metrics.counter_value(name) or 0
