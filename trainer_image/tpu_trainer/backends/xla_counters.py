"""torch_xla's own metrics as `Counters`.

A metric keeps its last 1024 samples and hands all of them over (50 microseconds); a counter is one number (0.3). So
what is asked in every step is taken from counters.
"""

from __future__ import annotations

from torch_xla.debug import metrics

from tpu_trainer.backends.base import Counters

_READ_OF_A_NUMBER = "aten::_local_scalar_dense"
"""Counted among the fallbacks by torch_xla, but it is the read itself, and its transfer is counted already."""


class XlaCounters:
    """Leaves out the reads that the backend makes for itself: nobody can act on those.

    `replicas`: threads of this process that run a replica each (two per chip on v2 and v3). torch_xla counts for all of
    them together, so each is told its part.
    """

    _own_reads = 0
    """Of all replicas of the process, as what it is taken from."""

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas

    def own_read(self) -> None:
        """The backend makes one transfer from the device."""
        XlaCounters._own_reads += 1

    def compilations(self) -> int:
        return _counter("UncachedCompile") // self._replicas

    def read(self) -> Counters:
        _, compile_nanoseconds = _metric("CompileTime")
        reads, _ = _metric("TransferFromDeviceTime")
        # A program over several devices of one process is counted under a name of its own.
        executions = _counter("ExecuteComputation") + _counter("ExecuteReplicated")
        names = [name for name in metrics.executed_fallback_ops() if name != _READ_OF_A_NUMBER]
        return Counters(
            compilations=self.compilations(),
            compile_seconds=compile_nanoseconds / 1e9 / self._replicas,
            executions=executions // self._replicas,
            host_reads=(reads - self._own_reads) // self._replicas,
            fallbacks={name: _counter(name) // self._replicas for name in names},
        )


def _metric(name: str) -> tuple[int, float]:
    """Samples and their sum; a metric without samples does not exist yet."""
    data = metrics.metric_data(name)
    return (0, 0.0) if data is None else (int(data[0]), float(data[1]))


def _counter(name: str) -> int:
    """0 for one that has never been counted up."""
    return metrics.counter_value(name) or 0
