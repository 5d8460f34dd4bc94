"""What all XLA backends share: tensors to and from the device, traced graphs, a sync per step, torch_xla's counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Barrier
from typing import Any, ClassVar

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch_xla.debug import metrics

from tpu_contract.protocol import ProgramMatch
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.gang.backends.base import Counters, map_tensors, tensors_of, to_rows
from tpu_trainer.gang.backends.feed import feed_ahead
from tpu_trainer.gang.backends.program import live_tensors, pending, stablehlo_of
from tpu_trainer.gang.backends.torch_xla_repairs import repair_frozen_norms, repair_scans
from tpu_trainer.gang.program_digest import compare, digest_of

_READ_OF_A_NUMBER = "aten::_local_scalar_dense"
"""torch_xla counts it among the fallbacks, but it is the read itself, and its transfer is counted already."""


class XlaDevice:
    """The device of this process, or of this thread where torch_xla runs a thread per device.

    Counts leave out the backend's own reads, which users cannot avoid.
    """

    reads_together = False

    _own_reads = 0
    """Reads by the backend itself, in all replicas of the process, like the count that they are subtracted from."""

    _meetings: ClassVar[dict[int, Barrier]] = {}
    """Barriers for the replicas of the process, by their number."""

    def __init__(self, replicas: int = 1) -> None:
        """`replicas`: threads of this process with one replica each (two per chip on v2 and v3). torch_xla counts for
        all of them together, so each gets its share."""
        repair_scans()
        repair_frozen_norms()
        self.device: torch.device = torch_xla.device()
        self._replicas = replicas
        self._meeting = self._meetings.setdefault(replicas, Barrier(replicas))

    def seed(self, seed: int) -> None:
        torch_xla.manual_seed(seed, self.device)

    def to_device(self, batch: Any) -> Any:
        try:
            return map_tensors(self.send, batch)
        except (RuntimeError, ValueError) as error:
            if (what := _find_unsupported(batch, error)) is None:
                raise
            raise UserCodeError(
                f"a batch holds {what}, which an XLA device does not support; convert it to dense tensors in collate, "
                "such as padded examples and their lengths"
            ) from None

    def marks(self, tensors: Sequence[Tensor]) -> list[object]:
        # A tensor that is yet to be computed has no handle.
        pending = torch_xla._XLAC._check_tensor_need_materialization(list(tensors))
        computed = [tensor for tensor, is_pending in zip(tensors, pending, strict=True) if not is_pending]
        handles = iter(torch_xla._XLAC._get_tensors_handle(computed))
        return [object() if is_pending else next(handles) for is_pending in pending]

    def feed(
        self, batches: Iterator[tuple[Any, Any]], busy: Callable[[], AbstractContextManager[None]] | None = None
    ) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        if busy is None:
            return feed_ahead(batches, self.to_device)

        def finish() -> None:
            with busy():
                xm.wait_device_ops(xm.xla_real_devices([self.device]))

        return feed_ahead(batches, self.to_device, finish)

    def numbers(self, values: Sequence[float]) -> Tensor:
        return self.send(torch.tensor([values], dtype=torch.float32))

    def send(self, tensor: Tensor) -> Tensor:
        """Copies a host tensor to the device at once.

        Not `tensor.to(device)`: with a thread that prepares batches ahead, the number of compilations then varied from
        run to run, as if a sync caught unfinished copies. Replicas whose graphs differ would wait for each other
        forever.
        """
        (sent,) = xm.send_cpu_data_to_device([tensor], self.device)
        result: Tensor = sent
        return result

    def row(self, tensor: Tensor, count: int, number: Tensor) -> Tensor:
        """Returns row `number`, which is data on the device, of the elements in `count` equal rows (`to_rows`)."""
        if tensor.device.type != "xla":
            tensor = self.send(tensor)
        return to_rows(tensor, count).index_select(0, number.reshape(1)).reshape(-1)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fetches the tensors in one transfer: one by one, each would wait for a separate graph. Host tensors pass
        through."""
        remote = [tensor for tensor in tensors if tensor.device.type == "xla"]
        if remote:
            XlaDevice._own_reads += 1
        fetched = iter(torch_xla._XLAC._xla_get_cpu_tensors(remote) if remote else ())
        return [next(fetched) if tensor.device.type == "xla" else tensor for tensor in tensors]

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext() if self._replicas == 1 else self._together()

    @contextmanager
    def _together(self) -> Iterator[None]:
        self._meeting.wait()
        yield
        self._meeting.wait()

    def compilations(self) -> int:
        # A counter takes 0.3 microseconds; a metric, which returns its last 1024 samples, takes 50.
        return _counter("UncachedCompile") // self._replicas

    def counters(self) -> Counters:
        _, compile_nanoseconds = _metric("CompileTime")
        reads, _ = _metric("TransferFromDeviceTime")
        # A program over several devices of one process is counted under another name.
        executions = _counter("ExecuteComputation") + _counter("ExecuteReplicated")
        names = [name for name in metrics.executed_fallback_ops() if name != _READ_OF_A_NUMBER]
        return Counters(
            compilations=self.compilations(),
            compile_seconds=compile_nanoseconds / 1e9 / self._replicas,
            executions=executions // self._replicas,
            host_reads=(reads - XlaDevice._own_reads) // self._replicas,
            fallbacks={name: _counter(name) // self._replicas for name in names},
        )

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        # The binding holds the interpreter's lock while it waits for the device's earlier work. If replicas are
        # threads, that work may be a collective for which the others need the lock, so wait for it first.
        xm.wait_device_ops(xm.xla_real_devices([self.device]))
        return bytes(torch_xla._XLAC._get_graph_hash(list(tensors))).hex()

    def compare_program(self, checked: str) -> ProgramMatch | None:
        return compare(digest_of(stablehlo_of(pending(live_tensors(self.device)))), checked)

    def sync(self) -> None:
        torch_xla.sync()


def _metric(name: str) -> tuple[int, float]:
    """Returns the number of samples and their sum; a metric without samples does not exist yet."""
    data = metrics.metric_data(name)
    return (0, 0.0) if data is None else (int(data[0]), float(data[1]))


def _counter(name: str) -> int:
    """Returns a counter's value, 0 for one that has never been increased."""
    return metrics.counter_value(name) or 0


def _find_unsupported(batch: Any, error: Exception) -> str | None:
    """Names the part of the batch that may have caused the error; None if the device itself has failed."""
    if "PackedSequence" in str(error):
        return "a PackedSequence"
    for tensor in tensors_of(batch):
        if tensor.is_nested:
            return "a nested tensor"
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return f"a tensor of layout {tensor.layout} and type {tensor.dtype}"
    return None
