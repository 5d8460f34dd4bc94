"""Traces the repeating step of the real training loop as one of four chips would, and writes its program.

XLA's CPU device takes the graph of four replicas but cannot run it, since its collectives need the others. So nothing
is executed: a sync of the loop hands over what would have been compiled, and then every tensor that the run keeps gets
a value of the same shape, as if the step had been made. The second step is the one that repeats, because only then is
the optimizer's state an input.

`python -m tests.aot.traced_step DIRECTORY` reads each DIRECTORY/NAME.json, a run spec, and writes NAME.mlir and
NAME.arguments; see `Program`. It also writes `flags`, what torch_xla sets for libtpu on a v5e.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import Tensor
from torch_xla._internal import pjrt

from tpu_trainer import loop, training
from tpu_trainer.backends.xla import XlaChip
from tpu_trainer.clock import Clock
from tpu_trainer.context import RunContext
from tpu_trainer.doctor.hang import Pace
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.exchange import Sums, exchange
from tpu_trainer.preparation import prepare
from tpu_trainer.progress import Progress
from tpu_trainer.reporting.heartbeat import open_heartbeat
from tpu_trainer.spec import RunSpec, parse_run_spec
from tpu_trainer.telemetry.reporter import open_reporter
from tpu_trainer.telling import Telling
from tpu_trainer.trainable import Work

CHIPS = 4

UNREDUCED = "unreduced"
"""A case whose name begins so leaves the gradients as they are: what the exchange costs is the difference."""


@dataclass(frozen=True)
class Program:
    """A step's program. `in_place`: (argument, result) pairs that are the same tensor before and after the step.

    kept: bytes of all tensors that live on. other: bytes of all other results; gradients that a name still refers to
    would be among them.
    """

    stablehlo: str
    in_place: list[tuple[int, int]]
    kept: int
    other: int


class Traced(BaseException):
    """Ends the run: not an Exception, so that nobody takes it for a failure."""

    def __init__(self, program: Program) -> None:
        self.program = program


class UncompiledChip(XlaChip):
    """The chip of this replica, whose programs are looked at instead of run."""

    work: Work | None = None
    reduces = True
    _steps = 0

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...

    def barrier(self) -> None: ...

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [list(row)] * self.world

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.ones(tensor.shape) for tensor in tensors]

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        return super().reduce(gradients, signals) if self.reduces else (list(gradients), signals)

    def exchange(self, *args: Any, **named: Any) -> Sums:
        self._sums = exchange(*args, **named)
        return self._sums

    def sync(self) -> None:
        self._steps += self.work is not None and bool(self.work.optimizer.state)
        kept = list(_kept(self.work)) if self.work is not None else []
        if self._steps == 2:
            read = [self._sums.signals, *(one for one in (self._sums.square, self._sums.norm) if one is not None)]
            raise Traced(_program([*kept, *read], [*self._before, *[0] * len(read)]))
        with torch.no_grad():
            for tensor in kept:
                tensor.data = self.send(torch.empty(tensor.shape, dtype=tensor.dtype))
        self._before = [_id(tensor) for tensor in kept]
        # As a sync does: the next step's collectives come after nothing.
        torch_xla._XLAC._set_all_reduce_token(str(self.device), None)

    def prepare(self, *args: Any) -> Work:
        self.work = prepare(*args)
        return self.work


def _kept(work: Work) -> Iterator[Tensor]:
    yield from work.task.model.parameters()
    yield from work.task.model.buffers()
    for state in work.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.device.type == "xla")
    if work.average is not None:
        yield from work.average.tensors.values()


def _program(kept: list[Tensor], before: list[int]) -> Program:
    now = [_id(tensor) for tensor in kept]
    order = sorted(range(len(kept)), key=now.__getitem__)
    outputs = [kept[place] for place in order]
    arguments, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
    in_place = [
        (arguments.index(before[place]), result) for result, place in enumerate(order) if before[place] in arguments
    ]
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    return Program(_stablehlo(outputs), in_place, size, _results(_stablehlo([])) - size)


def _id(tensor: Tensor) -> int:
    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def _stablehlo(outputs: list[Tensor]) -> str:
    """Without `outputs`: the program of all tensors that anything refers to, which is what a sync compiles."""
    return torch_xla._XLAC._get_stablehlo(outputs, torch_xla._XLAC._xla_get_default_device(), [], False).decode()


def _results(program: str) -> int:
    """Bytes of the results that are computed: a tensor that the step only reads is handed through."""
    (line,) = (line for line in program.splitlines() if line.startswith("    return "))
    names, kinds = line.removeprefix("    return ").split(" : ")
    pairs = zip(names.split(", "), re.findall(r"tensor<([^ ]*)>", kinds), strict=True)
    return sum(_bytes(kind) for name, kind in pairs if not name.startswith("%arg"))


def _bytes(kind: str) -> int:
    """Of a tensor's type in MLIR, such as 4096x4096xf32."""
    *shape, element = kind.replace("complex<f32", "f64").rstrip(">").split("x")
    return math.prod(map(int, shape)) * int(element.lstrip("uibf")) // 8


def _trace(spec: RunSpec, reduces: bool, environment: WorkerEnvironment) -> Program:
    clock, progress = Clock(), Progress(spec.train_steps, None, silent=True)
    telling = Telling(progress, open_reporter(spec, None, clock, "", reports=False), open_heartbeat(None, dict), False)
    chip = UncompiledChip(expected_replicas=CHIPS)
    chip.reduces = reduces
    try:
        # Also the results that the loop reads later are outputs of the program.
        with mock.patch.object(loop, "exchange", chip.exchange), mock.patch.object(training, "prepare", chip.prepare):
            training.run_own_loop(RunContext(spec, environment, lambda: False, chip, clock, Pace(), telling))
    except Traced as traced:
        return traced.program
    raise AssertionError("the run ended before its second step")


def _main(directory: Path) -> None:
    if xr.global_ordinal() != 0:
        return
    environment = WorkerEnvironment(directory, 0, 1, "", 0, None)
    for path in sorted(directory.glob("*.json")):
        document = json.loads(path.read_bytes())
        program = asdict(_trace(parse_run_spec(document), not path.name.startswith(UNREDUCED), environment))
        path.with_suffix(".mlir").write_text(program.pop("stablehlo"))
        path.with_suffix(".arguments").write_text(json.dumps(program))
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4")
    torch_xla._setup_libtpu_flags()
    (directory / "flags").write_text(os.environ["LIBTPU_INIT_ARGS"])


if __name__ == "__main__":
    work = functools.partial(_main, Path(sys.argv[1]))
    pjrt._run_thread_per_device(0, 1, work, pjrt.initialize_multiprocess)
    # Without the runtime's own ending, which waits for what has never been run.
    os._exit(0)
