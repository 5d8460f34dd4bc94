"""The whole line: a small task trains to its end; it trains again until it is stopped, and goes on from its checkpoint.

Both must hold the same bits in the end. It is the trainer's own loop, in the processes that are there already.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.utils.data import TensorDataset

from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import BatchSpec, CheckpointSpec, OptimizerSpec, RunSpec
from tpu_contract.slice_check import SliceCheckLine, SliceSection
from tpu_trainer.checkpoint.catalogue import survey
from tpu_trainer.checkpoint.parts import file_of
from tpu_trainer.checks.slice.lines import judge, timed
from tpu_trainer.contract.clock import Clock, StepPace
from tpu_trainer.loop.context import RunContext
from tpu_trainer.reporting.loss_trend import LossTrend
from tpu_trainer.reporting.progress import ProgressLog
from tpu_trainer.reporting.reporter import open_reporter
from tpu_trainer.reporting.run_outputs import RunOutputs
from tpu_trainer.storage import open_store
from tpu_trainer.task.task import Hyperparameters, Task
from tpu_trainer.worker.replica import train

if TYPE_CHECKING:
    from tpu_trainer.checks.slice.command import SliceProbe

_RUN = SliceSection.RUN
STEPS, STOP_STEP, PER_REPLICA, _WIDTH = 20, 8, 16, 256
_RUNS = (("train", "straight", False), ("stop", "stopped", True), ("resume", "stopped", False))
"""Each run: its name, its folder of checkpoints, and whether it is stopped."""


def check_whole_line(check: SliceProbe) -> Iterator[SliceCheckLine]:
    """Yields a line for each run and one for the comparison, which the reporting replica makes. A collective. Measures
    the seconds of each run, and of the first step of all; deletes its checkpoints."""
    context, seconds, first = check.context, check.seconds, 0
    job, kept, reports = context.spec.job, context.spec.checkpoint, context.outputs.is_reporter
    root, above = (tempfile.gettempdir(), f"{job.uid}/") if kept is None else (kept.uri, "")
    own = f"{above}slice-check-{job.attempt}"
    place = f"{root.rstrip('/')}/{own}"
    if reports:
        _delete(root, own)
    check.come("the first run")
    try:
        for number, (name, folder, stops) in enumerate(_RUNS, 1):
            pace, expected = StepPace(), ExitCode.Preempted if stops else ExitCode.Succeeded
            with timed(seconds, name):
                code = _run(context, _small(context.spec, number, f"{place}/{folder}"), pace, stops, seconds)
            last = pace.last or 0
            good = code is expected and (STOP_STEP <= last < STEPS if stops else last == STEPS)
            good = good and pace.steps == last - first
            measured = f"{code.name} after step {pace.last}, {pace.steps} steps made in {seconds[name]:.1f} s"
            wanted = f"{expected.name}{'' if stops else f' after step {STEPS}'}, on from step {first}"
            yield judge(_RUN, name, good, measured, wanted, "look at the worker's log", seconds[name], "s")
            if not good:
                return
            first = last if stops else 0
        if reports:
            yield _compare(place)
    finally:
        if reports:
            _delete(root, own)


def _run(context: RunContext, spec: RunSpec, pace: StepPace, stops: bool, seconds: dict[str, float]) -> ExitCode:
    """Trains; a run that stops is asked to after step STOP_STEP, as by SIGTERM, and may make a step more."""
    began, clock, backend = time.monotonic(), Clock(), context.backend

    def stop() -> bool:
        if pace.last is not None:
            seconds.setdefault("first step", time.monotonic() - began)
        return context.stop() or (stops and (pace.last or 0) >= STOP_STEP - 1)

    reporter = open_reporter(spec, None, clock, "", reports=False)
    log, trend = ProgressLog(STEPS, silent=True), LossTrend(0)
    outputs = RunOutputs(log, reporter, None, context.outputs.is_reporter, trend)
    store = backend.store
    # The keys of a training are not those of the one before.
    backend.store = None if store is None else PrefixStore(f"attempt-{spec.job.attempt}", store)
    try:
        return train(replace(context, spec=spec, stop=stop, clock=clock, pace=pace, outputs=outputs)).code
    finally:
        backend.store = store


def _small(spec: RunSpec, number: int, place: str) -> RunSpec:
    """Returns the run of the small task on the job's slice, backend and hardware; number: its attempt."""
    return RunSpec(
        job=replace(spec.job, attempt=number),
        entrypoint=f"{make.__module__}:{make.__name__}",
        backend=spec.backend,
        hardware=spec.hardware,
        slice=spec.slice,
        torch=spec.torch,
        batch=BatchSpec(spec.slice.replicas * PER_REPLICA, PER_REPLICA),
        train_steps=STEPS,
        warmup_steps=0,
        evaluate_every_steps=None,
        ema_decay=None,
        seed=7,
        optimizer=OptimizerSpec("adamw", 0.001, None, 0.01, None, None, None),
        data_uri=None,
        checkpoint=CheckpointSpec(place, None, None, keep=2),
    )


def make(hp: Hyperparameters) -> Task:
    """Returns the small task: a network on numbers that it draws itself, the same in every process."""
    numbers = torch.Generator().manual_seed(17)
    features = torch.randn(4 * hp.global_batch_size, _WIDTH, generator=numbers)
    labels = torch.randint(0, 10, (len(features),), generator=numbers)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(_WIDTH, 10))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Task(model=model, train=TensorDataset(features, labels), loss=loss)


def _compare(place: str) -> SliceCheckLine:
    """Compares the tensors of both last checkpoints by the marks in their COMMITs."""
    marks: list[Mapping[str, object]] = []
    for folder in ("straight", "stopped"):
        commit, _ = max(survey(open_store(f"{place}/{folder}")).candidates, key=lambda found: found[0].step)
        marks.append({"step": commit.step} | {file: mark for file, mark in commit.files.items() if file_of(file)})
    different = [name for name in {**marks[0], **marks[1]} if marks[0].get(name) != marks[1].get(name)]
    measured = f"other {', '.join(different)}" if different else f"the same after step {marks[0]['step']}"
    advice = "equal steps gave other bits, as a chip does that computes wrongly: run the check again"
    return judge(_RUN, "bit for bit", not different, measured, "the same bits as without a stop", advice)


def _delete(root: str, folder: str) -> None:
    """Deletes a folder. In a directory, those above it go too if they are empty then, up to the root."""
    store = open_store(root)
    for name in store.list(f"{folder}/"):
        store.delete(name)
