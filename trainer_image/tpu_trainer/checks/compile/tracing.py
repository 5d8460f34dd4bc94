"""Traces the repeating step of the real training loop as one replica of the slice would, without running it.

XLA's CPU device takes the graph of any number of replicas but cannot run it alone, since its collectives need the
others. So nothing is executed: a sync of the loop hands over what would have been compiled, and then every tensor that
lives on gets a value of the same shape, as if the step had been made. The first step is recorded, operation by
operation; the second is the one that repeats, because only then is the optimizer's state an input; the third must be
the same program. If it is not, two more steps are recorded, to find where they part.

`python -m tpu_trainer.checks.compile.tracing` reads a request from stdin and writes the step to stdout, both as JSON.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from tpu_contract.run_spec import NotFinitePolicy, ReportSpec, RunSpec
from tpu_trainer.checks.compile.operation_recorder import (
    FALLBACK,
    HOST_READ,
    DynamicShapeError,
    OperationRecorder,
    TracingFinding,
    first_difference,
)
from tpu_trainer.checks.compile.tpu_operations import operations_as_on_tpus
from tpu_trainer.checks.kernels import lower_kernels_for_tpus
from tpu_trainer.contract.clock import Clock, StepPace
from tpu_trainer.contract.environment import WorkerEnvironment, check_run_spec
from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.contract.outcome import outcome_of
from tpu_trainer.data.loading import has_length, is_sharded
from tpu_trainer.data.shards import open_shard
from tpu_trainer.doctor.padding import LEAST_WASTE, products_of
from tpu_trainer.gang.backends.base import map_tensors
from tpu_trainer.gang.backends.feed import AHEAD, feed_in_turn
from tpu_trainer.gang.backends.program import live_tensors, number_of, pending, stablehlo_of
from tpu_trainer.gang.backends.xla import XlaChip
from tpu_trainer.gang.program_digest import digest_of
from tpu_trainer.lightning import LightningRun
from tpu_trainer.loop import training
from tpu_trainer.loop.context import RunContext
from tpu_trainer.loop.preparation import load
from tpu_trainer.reporting.loss_trend import LossTrend
from tpu_trainer.reporting.progress import ProgressLog
from tpu_trainer.reporting.reporter import open_reporter
from tpu_trainer.reporting.run_outputs import RunOutputs
from tpu_trainer.task.task import Hyperparameters, Task
from tpu_trainer.worker.entry import die

_PR_SET_PDEATHSIG = 1
"""prctl(2): the kernel ends this process when the one that started it ends, however that happens."""

WATCHED, STEADY, NEXT = range(3)
"""The traced steps, in order."""

STEPS, MORE_STEPS = 3, 5
"""The number of steps to trace, and the number if the programs of STEADY and NEXT differ."""


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
        return digest_of(self.stablehlo)


@dataclass(frozen=True)
class Step:
    """The traced step. passes: the program of each pass before the last, if gradients are accumulated. ahead: bytes of
    the batches on the device besides the one in use. flops, flops_wide: as in `OperationRecorder`, of a pass."""

    program: Program
    passes: Program | None
    ahead: int
    flops: int
    flops_wide: int
    found: list[TracingFinding]
    products: list[dict[str, Any]]
    parameters: int


class Traced(BaseException):
    """Ends the run. Not an Exception, so that no code takes it for a failure."""


class UncompiledChip(XlaChip):
    """This replica's chip, whose programs are recorded instead of run."""

    model: nn.Module | None = None
    batch = 0
    _fed = False

    def __init__(self, replicas: int, passes: int, *, records_all: bool) -> None:
        super().__init__(replicas)
        self.passes = passes
        self._records_all = records_all
        self._reduced = False
        self._held: dict[int, tuple[TensorWeakRef, int]] = {}
        self._pending: list[Program] = []
        self._current = OperationRecorder()
        self._recording = False
        self.recorders: list[OperationRecorder] = []
        self.steps: list[tuple[Program, Program | None]] = []

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...

    def barrier(self) -> None: ...

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [list(row)] * self.world

    def place(self, model: nn.Module, source: int = 0) -> None:
        super().place(model, source)
        self.model = model

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns numbers that let a run continue: of a step's signals, loss and weight are 1, and all others are 0."""
        return [_numbers(tensor, self._fed) if tensor.device.type == "xla" else tensor for tensor in tensors]

    def feed(
        self, batches: Iterator[tuple[Any, Any]], busy: Callable[[], AbstractContextManager[None]] | None = None
    ) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        self._fed = True
        self.record(True)
        return feed_in_turn(batches, self._place)

    def _place(self, batch: Any) -> Any:
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
        """Does nothing: the other replicas, for which it would wait, do not exist."""
        return nullcontext()

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        """Returns None, because asking torch_xla for it would run what is pending."""
        return None

    def sync(self) -> None:
        live = live_tensors(self.device)
        computed = pending(live)
        if self.steps or self._reduced:
            self._pending.append(self._program(computed))
        if self._reduced:
            self._reduced = False
            # The passes of the first step were not kept. The pass before the last adds to what is there.
            *before, last = self._pending
            self.steps.append((last, before[-1] if before and self.passes > 1 else None))
            self._pending.clear()
            self._step_ends()
        with torch.no_grad():
            for tensor in computed:
                tensor.data = self._as_computed(tensor)
        self._held = {id(tensor): (TensorWeakRef(tensor), number_of(tensor)) for tensor in live}
        # A sync does the same: the next step's collectives wait for nothing, and its random numbers begin with data.
        torch_xla._XLAC._set_all_reduce_token(str(self.device), None)
        self.seed(torch_xla._XLAC._xla_get_rng_seed(str(self.device)))

    def _as_computed(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the shape that a step would have left.

        It has no memory unless something may read it, as an operation without a TPU kernel does; the first step shows
        whether there is one.
        """
        if self.recorders and not any(finding.kind == FALLBACK for finding in self.recorders[0].findings):
            with suppress(KeyError):
                placeholder: Tensor = create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
                if placeholder.dtype == tensor.dtype:
                    return placeholder
        # Zeros keep most operations finite.
        return self.send(torch.zeros(tensor.shape, dtype=tensor.dtype))

    def _step_ends(self) -> None:
        if self._recording:
            self.recorders.append(self._current)
            self.record(False)
        count = len(self.steps)
        if count >= STEPS and (self.same or count == MORE_STEPS):
            raise Traced
        # A number from the device's memory would have to be computed.
        reads = any(finding.kind == HOST_READ for finding in self.recorders[0].findings)
        self.record(count >= STEPS or reads or self._records_all)

    @property
    def same(self) -> bool:
        """True if the step's program repeats."""
        steady, following = (
            [program and program.digest for program in self.steps[number]] for number in (STEADY, NEXT)
        )
        return steady == following

    def record(self, on: bool) -> None:
        """Starts or ends the recording of a step. It is off where it is not needed, since torch_xla makes some tensors
        in another way under it."""
        if self._recording:
            self._current.__exit__(None, None, None)
        if on:
            self._current = OperationRecorder()
            self._current.__enter__()
        self._recording = on

    def _program(self, outputs: list[Tensor]) -> Program:
        arguments, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
        places = {number: place for place, number in enumerate(arguments)}
        in_place, kept = [], 0
        for result, tensor in enumerate(outputs):
            held, before = self._held.get(id(tensor), (None, -1))
            if held is not None and held() is tensor:
                kept += tensor.nbytes
                if before in places:
                    in_place.append((places[before], result))
        names = self._names()
        size = sum(tensor.nbytes for tensor in outputs)
        return Program(
            stablehlo_of(outputs), in_place, kept, size - kept, [names.get(number, "") for number in arguments]
        )

    def _names(self) -> dict[int, str]:
        """Returns the names of the model's tensors, by the number that each had when the step began."""
        if self.model is None:
            return {}
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {self._held[id(tensor)][1]: name for name, tensor in tensors if id(tensor) in self._held}


def _numbers(tensor: Tensor, signals: bool) -> Tensor:
    """Returns ones: equal before the training, when values are compared with each other."""
    ones = torch.ones(tensor.shape, dtype=tensor.dtype)
    if signals:
        ones.view(-1)[2:] = 0
    return ones


class _FirstExamples(Dataset[Any]):
    """A dataset's first examples, repeated: a batch of another size is made of them."""

    def __init__(self, dataset: Any, count: int, length: int) -> None:
        if has_length(dataset):
            self._examples = [dataset[index] for index in range(min(count, len(dataset)))]
        else:
            stream = open_shard(dataset, 0, 0) if is_sharded(dataset) else dataset
            self._examples = list(islice(stream, count))
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._examples[index % len(self._examples)]


def trace(spec: RunSpec, examples: int | None = None, *, records_all: bool = False) -> Step:
    """Traces the step of replica 0. `examples`: the number to read, and to repeat. `records_all`: whether all steps are
    recorded, to find what reads off the device in some of them only.

    Raises:
        TrainerError: as a run would, before its third step.
        BadSpecError: this check cannot trace the run's backend.
    """
    if spec.backend != "xla":
        raise BadSpecError(
            f'backend: the check traces a replica of backend "xla", got "{spec.backend}"; with '
            "--set trainer.backend=XLA it checks that one"
        )
    chip = UncompiledChip(spec.slice.replicas, spec.batch.accumulation, records_all=records_all)
    clock, progress = Clock(), ProgressLog(spec.train_steps, silent=True)
    reporter, losses = open_reporter(spec, None, clock, "", reports=False), LossTrend(spec.warmup_steps)
    outputs = RunOutputs(progress, reporter, None, False, losses)
    environment = WorkerEnvironment(Path(os.devnull), 0, 1, "", 0, None)
    lasting = _lasting(spec)
    if examples is not None:
        # These examples stand for the whole dataset, but its size is another.
        lasting = replace(lasting, dataset_size=None)
    context = RunContext(lasting, environment, lambda: False, chip, clock, StepPace(), outputs, die)

    try:
        loaded = load(context, Hyperparameters.of(lasting))
        if isinstance(loaded, LightningRun):
            raise BadSpecError("Lightning's own Trainer trains the module, and the check does not trace its loop")
        # An evaluation is no part of the step.
        task = replace(loaded.task, evaluation=None, metrics=None, evaluator=None)
        task = task if examples is None else _fewer(task, examples, spec.batch.total)
        training.run_own_loop(context, loaded._replace(task=task))
    except Traced:
        return _step(chip)
    finally:
        chip.record(False)
    raise AssertionError("the run ended before its third step")


def _step(chip: UncompiledChip) -> Step:
    assert chip.model is not None
    first, *others = chip.recorders
    findings = list(dict.fromkeys(finding for recorder in chip.recorders for finding in recorder.findings))
    if not chip.same:
        findings.append(first_difference([recorder.operations for recorder in others]))
    return Step(
        *chip.steps[STEADY],
        # Those in the queue, and the one that waits to enter it.
        (AHEAD + 1) * chip.batch,
        first.flops // chip.passes,
        first.flops_wide // chip.passes,
        findings,
        _padded_products(chip.model),
        sum(parameter.numel() for parameter in chip.model.parameters()),
    )


def _padded_products(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the matrix products of which padding to whole tiles is a large part, the largest loss first."""
    padded: list[dict[str, Any]] = []
    for product in products_of(model):
        waste = round(1 - product.useful / product.padded, 4)
        padded.append({"name": product.name, "shape": product.shape, "computed": product.computed, "waste": waste})
    padded.sort(key=lambda product: -product["waste"] * math.prod(product["shape"]))
    return [product for product in padded if product["waste"] >= LEAST_WASTE]


def _lasting(spec: RunSpec) -> RunSpec:
    """Returns the run without its ends, which are separate programs, and without anything that it would store."""
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
    """Returns the task with its first examples only. An epoch has one step, because its order is in memory."""
    return replace(task, train=_FirstExamples(task.train, examples, global_batch), order=None, workers=0)


def traced_step(request: Mapping[str, Any]) -> dict[str, Any]:
    """Traces the step of the run spec that `request` has, and returns it as JSON, or says what is wrong with it."""
    try:
        spec = check_run_spec(request["spec"])
        _stand_for_one_of(spec.slice.replicas)
        lower_kernels_for_tpus()
        with operations_as_on_tpus():
            step = trace(spec, request["examples"], records_all=request.get("recordsAll", False))
    except DynamicShapeError as error:
        # The shape depends on the user's data, so no other batch would help.
        return {"found": [error.finding.as_json()]}
    except Exception as error:
        outcome = outcome_of(error)
        return {"error": outcome.message, "code": outcome.code.name}
    return {**dataclasses.asdict(step), "digest": step.program.digest, "flags": _compiler_flags(spec.slice.generation)}


def _compiler_flags(generation: str) -> str:
    """Returns what a worker passes to libtpu: what the job sets, and what torch_xla adds to it on this generation."""
    own = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE=f"{generation}-1")
    torch_xla._setup_libtpu_flags()
    flags, os.environ["LIBTPU_INIT_ARGS"] = os.environ["LIBTPU_INIT_ARGS"], own
    return flags.strip()


def _stand_for_one_of(replicas: int) -> None:
    """Makes this process replica 0 of a gang of any size.

    torch counts devices in eight bits, and the program has the number of replicas only as a constant. So torch_xla gets
    two devices, for collectives to be traced at all.
    """
    os.environ["CPU_NUM_DEVICES"] = str(min(replicas, 2))
    pjrt.initialize_multiprocess(0, 1)
    xr._WORLD_SIZE, xr._ORDINAL = replicas, 0


def main() -> None:
    request = json.load(sys.stdin)
    # The process that asks waits for signals in a thread, and blocks them.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:
        return
    # What the user's code prints is no part of the answer.
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with os.fdopen(answer, "w") as file:
        json.dump(traced_step(request), file)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    # Without the runtime's own ending, which waits for what has never been run.
    os._exit(0)
