"""Traces the repeating step of the real training loop as one replica of the slice would, without running it.

XLA's CPU device takes the graph of any number of replicas but cannot run it alone, since its collectives need the
others. So nothing is executed: a sync of the loop hands over what would have been compiled, and then every tensor that
lives on gets a value of the same shape, as if the step had been made. The first step is watched, operation by
operation; the second is the one that repeats, because only then is the optimizer's state an input; the third must be
the same program. If it is not, two more steps are watched, to find where they part.

`python -m tpu_trainer.checks.compile.tracing DIRECTORY` reads DIRECTORY/request.json and writes
DIRECTORY/traced.json and the programs beside it.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.weak import TensorWeakRef
from torch_xla._internal import pjrt
from torch_xla.core.xla_builder import create_placeholder_tensor

from tpu_trainer.checks.compile.operation_recorder import (
    FALLBACK,
    HOST_READ,
    DynamicShapeError,
    Found,
    Watch,
    first_difference,
)
from tpu_trainer.contract.clock import Clock, StepPace
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.contract.outcome import outcome_of
from tpu_trainer.contract.spec import NotFinitePolicy, ReportSpec, RunSpec, parse_run_spec
from tpu_trainer.data.loading import has_length, is_sharded
from tpu_trainer.doctor.padding import Product, products_of
from tpu_trainer.gang.backends.base import map_tensors
from tpu_trainer.gang.backends.feed import feed_in_turn
from tpu_trainer.gang.backends.xla import XlaChip
from tpu_trainer.lightning import NeedsTrainerError
from tpu_trainer.loop import training
from tpu_trainer.loop.context import RunContext
from tpu_trainer.loop.entrypoint import Loaded
from tpu_trainer.loop.preparation import load
from tpu_trainer.reporting.heartbeat import open_heartbeat
from tpu_trainer.reporting.progress import ProgressLog
from tpu_trainer.reporting.report import ProgressReport
from tpu_trainer.reporting.reporter import open_reporter
from tpu_trainer.reporting.run_outputs import RunOutputs
from tpu_trainer.task.task import Hyperparameters, Task

WATCHED, STEADY, NEXT = range(3)
"""The traced steps, in their order."""

STEPS, MORE_STEPS = 3, 5
"""How many are traced, and how many if the programs of STEADY and NEXT differ."""


@dataclass(frozen=True)
class Program:
    """A program of the step, as torch_xla hands it to the compiler.

    in_place: (argument, result) pairs that are the same tensor before and after. kept: bytes of the results that live
    on from before the step, which are weights and the optimizer's state; other: bytes of all other results. arguments:
    the model's name for each argument, or "".
    """

    stablehlo: str
    in_place: list[tuple[int, int]]
    kept: int
    other: int
    arguments: list[str]

    @property
    def digest(self) -> str:
        # The module's name has a number in it.
        _, _, body = self.stablehlo.partition("\n")
        return hashlib.sha256(body.encode()).hexdigest()


@dataclass(frozen=True)
class Step:
    """What was traced. passes: the program of each pass before the last, if gradients are accumulated. batch: bytes of
    a pass's batch. flops, flops_wide: as in `Watch`, of a pass."""

    program: Program
    passes: Program | None
    batch: int
    flops: int
    flops_wide: int
    found: list[Found]
    products: list[Product]
    parameters: int


class Traced(BaseException):
    """Ends the run: not an Exception, so that nobody takes it for a failure."""


class UncompiledChip(XlaChip):
    """The chip of this replica, whose programs are looked at instead of run."""

    model: nn.Module | None = None
    batch = 0
    _fed = False

    def __init__(self, replicas: int, passes: int) -> None:
        super().__init__(replicas)
        self.passes = passes
        self._reduced = False
        self._held: dict[int, tuple[TensorWeakRef, int]] = {}
        self._pending: list[Program] = []
        self._current = Watch()
        self._watching = False
        self.watches: list[Watch] = []
        self.steps: list[tuple[Program, Program | None]] = []

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...

    def barrier(self) -> None: ...

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [list(row)] * self.world

    def place(self, model: nn.Module, source: int = 0) -> None:
        super().place(model, source)
        self.model = model

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Numbers that let a run continue: of a step's signals, a loss and a weight of 1, and no other signal."""
        return [_numbers(tensor, self._fed) if tensor.device.type == "xla" else tensor for tensor in tensors]

    def feed(self, batches: Iterator[tuple[Any, Any]]) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        self._fed = True
        self.watch(True)
        return feed_in_turn(batches, self._placed)

    def _placed(self, batch: Any) -> Any:
        sizes: list[int] = []

        def send(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return self.send(tensor)

        moved = map_tensors(send, batch)
        self.batch = max(self.batch, sum(sizes))
        return moved

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        self._reduced = True
        return super().reduce(gradients, signals)

    def quiet(self) -> AbstractContextManager[None]:
        """The other replicas, which it would wait for, are not there."""
        return nullcontext()

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        """Asking torch_xla for it would run what is pending."""
        return None

    def sync(self) -> None:
        live = _live()
        pending = _pending(live)
        if self.steps or self._reduced:
            self._pending.append(self._program(pending))
        if self._reduced:
            self._reduced = False
            # The passes of the first step were not kept. Of several, the one before the last adds to what is there.
            *before, last = self._pending
            self.steps.append((last, before[-1] if before and self.passes > 1 else None))
            self._pending.clear()
            self._step_ends()
        with torch.no_grad():
            for tensor in pending:
                tensor.data = self._as_computed(tensor)
        self._held = {id(tensor): (TensorWeakRef(tensor), _id(tensor)) for tensor in live}
        # As a sync does: the next step's collectives come after nothing.
        torch_xla._XLAC._set_all_reduce_token(str(self.device), None)

    def _as_computed(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape as a step would have left, without memory unless something may read it: an
        operation without a TPU kernel does, and the first step shows whether there is one."""
        if self.watches and not any(found.kind == FALLBACK for found in self.watches[0].found):
            with suppress(KeyError):
                made: Tensor = create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
                if made.dtype == tensor.dtype:
                    return made
        return self.send(torch.empty(tensor.shape, dtype=tensor.dtype))

    def _step_ends(self) -> None:
        if self._watching:
            self.watches.append(self._current)
            self.watch(False)
        count = len(self.steps)
        if count >= STEPS and (self.same or count == MORE_STEPS):
            raise Traced
        # An answer from a run's memory would have to be computed.
        self.watch(count >= STEPS or any(found.kind == HOST_READ for found in self.watches[0].found))

    @property
    def same(self) -> bool:
        """Whether the step's program repeats."""
        one, other = ([program and program.digest for program in self.steps[number]] for number in (STEADY, NEXT))
        return one == other

    def watch(self, on: bool) -> None:
        """Only where it is needed: under a watch torch_xla makes some tensors in another way."""
        if self._watching:
            self._current.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if on:
            self._current = Watch()
            self._current.__enter__()  # type: ignore[no-untyped-call]
        self._watching = on

    def _program(self, pending: list[Tensor]) -> Program:
        arguments, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(pending)
        places = {number: place for place, number in enumerate(arguments)}
        in_place, kept = [], 0
        for result, tensor in enumerate(pending):
            held, before = self._held.get(id(tensor), (None, -1))
            if held is not None and held() is tensor:
                kept += tensor.nbytes
                if before in places:
                    in_place.append((places[before], result))
        names = self._names()
        size = sum(tensor.nbytes for tensor in pending)
        return Program(
            _stablehlo(pending), in_place, kept, size - kept, [names.get(number, "") for number in arguments]
        )

    def _names(self) -> dict[int, str]:
        """Of the model's tensors, by the number they had when the step began."""
        if self.model is None:
            return {}
        own = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {self._held[id(tensor)][1]: name for name, tensor in own if id(tensor) in self._held}


def _live() -> list[Tensor]:
    """All tensors on the device that a name refers to, in the order in which they were made.

    A tensor of torch_xla's wraps another, which is an object of its own once a watch has seen it.
    """
    # The others are let go before any is looked at, which may end the tensor that one of these wraps.
    outer = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), Tensor) and one.is_xla and torch._is_functional_tensor(one)
    ]
    found: dict[int, Tensor] = {}
    for tensor in outer:
        # Not found through its owner, so it would not keep alive what it stands for.
        tensor._fix_weakref()
        found.setdefault(_id(tensor), tensor)
    return [found[number] for number in sorted(found)]


def _pending(tensors: list[Tensor]) -> list[Tensor]:
    """Those that a sync would compute."""
    needed = torch_xla._XLAC._check_tensor_need_materialization(tensors)
    return [tensor for tensor, wanted in zip(tensors, needed, strict=True) if wanted]


def _id(tensor: Tensor) -> int:
    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def _stablehlo(outputs: list[Tensor]) -> str:
    found: bytes = torch_xla._XLAC._get_stablehlo(outputs, torch_xla._XLAC._xla_get_default_device(), [], False)
    return found.decode()


def _numbers(tensor: Tensor, signals: bool) -> Tensor:
    """Equal ones before the training, when values are compared with each other."""
    here = torch.ones(tensor.shape, dtype=tensor.dtype)
    if signals:
        here.view(-1)[2:] = 0
    return here


class _Few(Dataset[Any]):
    """A dataset's first examples, as often as anyone asks: what a batch of another size is made of."""

    def __init__(self, dataset: Any, count: int, length: int) -> None:
        if has_length(dataset):
            self._examples = [dataset[index] for index in range(min(count, len(dataset)))]
        else:
            stream = dataset.shard(0, dataset.num_shards) if is_sharded(dataset) else dataset
            self._examples = list(islice(stream, count))
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._examples[index % len(self._examples)]


def trace(spec: RunSpec, directory: Path, examples: int | None = None) -> Step:
    """The step of replica 0. `examples`: read only so many, again and again.

    Raises:
        TrainerError: as a run would, before its third step.
        BadSpecError: this check cannot trace the run's backend.
    """
    if spec.backend != "xla":
        raise BadSpecError(
            f'backend: the check traces a replica of backend "xla", got "{spec.backend}"; with '
            "--set trainer.backend=XLA it checks that one"
        )
    chip = UncompiledChip(spec.slice.replicas, spec.batch.accumulation)
    clock, progress = Clock(), ProgressLog(spec.train_steps, None, silent=True)
    outputs = RunOutputs(
        progress, open_reporter(spec, None, clock, "", reports=False), open_heartbeat(None, _no_report), False
    )
    environment = WorkerEnvironment(directory, 0, 1, "", 0, None)
    lasting = _lasting(spec)
    if examples is not None:
        # The few stand for the whole dataset, and have another size.
        lasting = replace(lasting, dataset_size=None)
    context = RunContext(lasting, environment, lambda: False, chip, clock, StepPace(), outputs)

    def loaded(context: RunContext, hp: Hyperparameters) -> Loaded:
        found = load(context, hp)
        if examples is None:
            return found
        return found._replace(task=_fewer(found.task, examples, spec.batch.total))

    try:
        training.run_own_loop(context, loaded)
    except Traced:
        return _step(chip)
    except NeedsTrainerError as needs:
        text = f"the module needs Lightning's own Trainer ({needs.why}), whose loop the check does not trace"
        raise BadSpecError(text) from None
    finally:
        chip.watch(False)
    raise AssertionError("the run ended before its third step")


def _no_report() -> ProgressReport:
    raise AssertionError("nobody asks for one")


def _step(chip: UncompiledChip) -> Step:
    assert chip.model is not None
    watched, *others = chip.watches
    found = list(watched.found)
    if not chip.same:
        found.append(first_difference([watch.operations for watch in others]))
    return Step(
        *chip.steps[STEADY],
        chip.batch,
        watched.flops // chip.passes,
        watched.flops_wide // chip.passes,
        found,
        products_of(chip.model),
        sum(parameter.numel() for parameter in chip.model.parameters()),
    )


def _lasting(spec: RunSpec) -> RunSpec:
    """The run without its ends, which are programs of their own, and without anything that it keeps anywhere."""
    return replace(
        spec,
        train_steps=max(spec.train_steps, 100),
        end_after_steps=None,
        evaluate_every_steps=None,
        on_not_finite=spec.on_not_finite if spec.on_not_finite is NotFinitePolicy.SKIP else NotFinitePolicy.WARN,
        checkpoint=None,
        report=ReportSpec(gradient_noise_scale=spec.report.gradient_noise_scale),
    )


def _fewer(task: Task, examples: int, global_batch: int) -> Task:
    """The dataset has one step in an epoch, because the order of an epoch is in memory."""
    return replace(task, train=_Few(task.train, examples, global_batch), order=None, workers=0)


def _as_json(step: Step, directory: Path) -> dict[str, Any]:
    """Without the programs' texts, which become files."""
    document = dataclasses.asdict(step)
    for name in ("program", "passes"):
        if document[name] is not None:
            (directory / f"{name}.mlir").write_text(document[name].pop("stablehlo"))
    return document


def _traced(directory: Path) -> dict[str, Any]:
    request = json.loads((directory / "request.json").read_bytes())
    try:
        spec = parse_run_spec(request["spec"])
        os.environ["CPU_NUM_DEVICES"] = str(spec.slice.replicas)
        pjrt.initialize_multiprocess(0, 1)
        xr._init_world_size_ordinal()
        return _as_json(trace(spec, directory, request.get("examples")), directory)
    except DynamicShapeError as error:
        # Of the user's data: no other batch would help.
        return {"found": [error.found.as_json()]}
    except Exception as error:
        outcome = outcome_of(error)
        return {"error": outcome.message, "code": outcome.code.name}


def main(directory: Path) -> None:
    (directory / "traced.json").write_text(json.dumps(_traced(directory)))
    # Only this call knows what torch_xla sets for libtpu on a generation.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", LIBTPU_INIT_ARGS="", TPU_ACCELERATOR_TYPE="v5litepod-4")
    torch_xla._setup_libtpu_flags()
    (directory / "flags").write_text(os.environ["LIBTPU_INIT_ARGS"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    # Without the runtime's own ending, which waits for what has never been run.
    os._exit(0)
