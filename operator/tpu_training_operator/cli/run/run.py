"""`tpujob run` trains a job on this machine, with processes as hosts."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import click
from rich.console import Console

from tpu_contract.noise_scale import MeasuredNoise
from tpu_contract.protocol import REQUIREMENTS_FILE
from tpu_contract.words import several
from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.constants import SLICE_CHECK_COMMAND
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.api.text import plain
from tpu_training_operator.api.validation import Problem
from tpu_training_operator.api.words import count
from tpu_training_operator.cli.code.option import add_code, code_option, code_problem, code_warnings, module_paths
from tpu_training_operator.cli.code.packing import PackedCode, pack
from tpu_training_operator.cli.code.place import put
from tpu_training_operator.cli.code.requirements import read_requirements
from tpu_training_operator.cli.common.changes import apply_options, rehearse, set_option, shorten, slice_option
from tpu_training_operator.cli.common.errors import BadInput, program_name
from tpu_training_operator.cli.common.job_file import JobFile, check, filename_option, load
from tpu_training_operator.cli.plan.ladder import rung_lines
from tpu_training_operator.cli.plan.summary import print_summary
from tpu_training_operator.cli.run.job_end import RESULT, job_end
from tpu_training_operator.cli.run.measure_noise import (
    keep_checkpoints_apart,
    measure_on_own_slice,
    measurement_problem,
    noise_json,
    noise_lines,
    read_noise,
)
from tpu_training_operator.cli.run.report import PAGE, run_history, write_page
from tpu_training_operator.cli.watch.display import display
from tpu_training_operator.cli.watch.job_view import job_view
from tpu_training_operator.cli.watch.sections import best_checkpoint, move_words
from tpu_training_operator.domain.cluster_state.hosts import host_of
from tpu_training_operator.domain.failures.messages import describe_place
from tpu_training_operator.domain.job.recipe.checkpointing import folder
from tpu_training_operator.html_report.history import UnreadableHistory, parse_history
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.local.outages import Outage, parse_outage
from tpu_training_operator.local.run import WEIGHTS, RunOutcome, WorkerLogs, pods_below, run_job

_INTERRUPTED = 130
_MOST_SHOWN = 10
_LOCAL_VOLUMES = ("empty_dir",)
# A trainer process with torch and torch_xla that trains the digits (measured: 0.62 GB).
_GB_PER_PROCESS = 0.7


@click.command()
@filename_option
@slice_option
@set_option
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Shorten the training to about N steps; warm-up, evaluations and milestones shrink in proportion.",
)
@click.option(
    "--output-dir", type=click.Path(path_type=Path), help="Where results and logs go. Default: runs/NAME-TIME-PID."
)
@code_option
@click.option(
    "--measure-noise",
    is_flag=True,
    help="Train the recipe where it was tuned (recipe.tunedOn, or else the job's slice), and print the gradient noise"
    " scale for recipe.gradientNoiseScale.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show what the workers print, each line after its pod.")
@click.option(
    "--simulate-loss",
    "losses",
    metavar="SLICE:FROM-TO",
    multiple=True,
    help="Pretend that this slice is lost between these seconds of the run, for example v5litepod-16:20-45, to see how"
    " a job with spec.placement moves. Can be repeated.",
)
@click.option("--overwrite", is_flag=True, help="Use --output-dir even if it holds another run, and replace that run.")
def run(
    filename: Path,
    on_slice: str | None,
    values: tuple[str, ...],
    steps: int | None,
    output_dir: Path | None,
    code: Path | None,
    measure_noise: bool,
    verbose: bool,
    overwrite: bool,
    losses: tuple[str, ...],
) -> None:
    """Train a job on this machine, without a cluster."""
    if measure_noise and on_slice is not None:
        raise click.UsageError("--measure-noise trains on the slice on which the recipe was tuned: leave out --slice")
    file = _load(filename, on_slice, values, steps, measure_noise)
    outages = _outages(losses, file)
    python_path = module_paths(file, code)
    problem = _suspension_problem(file) or find_memory_problem(file) or code_problem(file, code, python_path)
    if measure_noise:
        problem = problem or measurement_problem(file)
    if problem is not None:
        raise BadInput(filename, [problem])
    packed = None if code is None else pack(code)
    warnings = [
        *file.warnings,
        *_omitted_parts(file),
        *code_warnings(file, packed, python_path),
        *_not_here(code, packed),
    ]
    # The process id distinguishes runs that start within one second.
    directory = output_dir or Path("runs") / f"{file.job.name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    # A run that was killed or still runs has pods but no result.
    if ((directory / RESULT).exists() or pods_below(directory).exists()) and not overwrite:
        raise click.UsageError(
            f"--output-dir {directory} holds another run: name another directory, or add --overwrite to replace it"
        )
    if code is not None and code.resolve().is_relative_to(directory.resolve()):
        raise click.UsageError(f"--output-dir {directory}: its results would be packed as code; name a folder below it")
    _make_writable(directory)
    click.get_current_context().with_resource(_lock(directory))
    if not any(directory.iterdir()):
        # The results of a run are not part of the code that the next run packs.
        (directory / ".gitignore").write_text("*\n", encoding="utf-8")
    if packed is not None:
        file = _with_code(file, packed, directory.resolve())
        python_path = []
    if measure_noise:
        file = keep_checkpoints_apart(file, directory)
    print_summary(file, warnings)
    outcome = asyncio.run(show_run(file, directory.resolve(), python_path, verbose=verbose, outages=outages))
    result, page = directory / RESULT, directory / PAGE
    history = run_history(file, outcome, directory)
    noise = read_noise(history[0] if history else None)
    # Even with a full disk, the user sees how the training ended.
    with _reporting_failures(result):
        result.write_text(json.dumps(_result(file, outcome, history, noise), indent=1) + "\n", encoding="utf-8")
    with _reporting_failures(page):
        if history is not None:
            write_page(*history, page, job_end(directory))
    _print_end(file, outcome, directory, result)
    has_noise = not measure_noise or noise is not None
    if measure_noise:
        for line in noise_lines(noise):
            click.echo(line, err=not has_noise)
    # A script that goes on after exit code 0 reads the result.
    has_succeeded = outcome.status.state is State.SUCCEEDED and result.exists() and has_noise
    sys.exit(_INTERRUPTED if outcome.cancelled else 0 if has_succeeded else 1)


def _load(
    filename: Path, on_slice: str | None, values: tuple[str, ...], steps: int | None, measure_noise: bool
) -> JobFile:
    def change(body: Object) -> None:
        apply_options(body, values, on_slice)
        if measure_noise:
            measure_on_own_slice(body)
        rehearse(body)

    file = load(filename, change=change)
    if steps is None:
        return file
    shorten(file.body, file.resolution, steps)
    return check(filename, file.body)


def _not_here(code: Path | None, packed: PackedCode | None) -> list[str]:
    """Returns a warning about packages that the workers of a cluster install, and that nobody installs here."""
    if code is None or packed is None or REQUIREMENTS_FILE not in packed.sizes:
        return []
    missing = several(list(read_requirements(code).missing_here()), _MOST_SHOWN)
    there = f"workers of a cluster install that; here the environment of {program_name()} stays as it is"
    return [f"{REQUIREMENTS_FILE} asks for {missing}: {there}"] if missing else []


def _with_code(file: JobFile, packed: PackedCode, directory: Path) -> JobFile:
    """Puts the code into the run's directory, where the workers fetch it as from a shared volume."""
    uri = str(directory / f"code-{packed.sha256}.tar.gz")
    put(packed.archive, uri)
    add_code(file.body, packed, uri)
    return check(file.path, file.body)


def _outages(losses: tuple[str, ...], file: JobFile) -> list[Outage]:
    try:
        return [parse_outage(loss, file.options) for loss in losses]
    except ValueError as error:
        raise click.UsageError(f"--simulate-loss: {error}") from None


@contextlib.contextmanager
def _reporting_failures(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        click.echo(f"{program_name()}: {path}: {(error.strerror or str(error)).lower()}", err=True)
        # Half a file would be worse than none.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    except BadInput as error:
        error.show()


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # An existing directory may belong to another user, and its disk may be read-only or full.
        with TemporaryFile(dir=directory) as file:
            file.write(b"x")
    except OSError as error:
        raise click.UsageError(f"--output-dir {directory}: {(error.strerror or str(error)).lower()}") from None


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Locks the directory, because two runs in it would report each other's numbers. The lock ends with the process."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise click.UsageError(
            f"--output-dir {directory}: another `tpujob run` is using it; name another directory, or wait for its end"
        ) from None
    except OSError:
        # Some file systems have no locks.
        pass
    try:
        yield
    finally:
        os.close(handle)


async def show_run(
    file: JobFile,
    directory: Path,
    python_path: Sequence[Path] = (),
    *,
    verbose: bool = False,
    outages: Sequence[Outage] = (),
    out: Console | None = None,
) -> RunOutcome:
    """Runs the job here and shows it, by default on stdout, until it ends or an interrupt has stopped it."""
    logging.getLogger("tpu_training_operator").setLevel(logging.ERROR)
    interrupts: asyncio.Queue[None] = asyncio.Queue()
    loop, is_first = asyncio.get_running_loop(), True
    logs = WorkerLogs(pods_below(directory))
    with display(out or Console(highlight=False)) as shown:

        def interrupt() -> None:
            nonlocal is_first
            first, is_first = is_first, False
            shown.say("stopping the workers; interrupt again to kill them" if first else "killing the workers")
            interrupts.put_nowait(None)

        def show(job: Object, pods: list[Object]) -> None:
            if verbose:
                say_logs()
            hosts = [host for pod in pods if (host := host_of(pod)) is not None]
            shown.show(job_view(job, hosts, datetime.now(UTC)))

        def say_logs(*, with_last: bool = False) -> None:
            for pod, line in logs.new_lines(with_last=with_last):
                shown.say(f"{pod}: {plain(line)}")

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            return await run_job(file.body, directory, python_path, show, interrupts, outages)
        finally:
            if verbose:
                say_logs(with_last=True)
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(ValueError):
                    loop.remove_signal_handler(number)


def _suspension_problem(file: JobFile) -> Problem | None:
    if not file.job.spec.run_policy.suspend:
        return None
    return Problem("spec.runPolicy.suspend", "the job is suspended and would never start; set this to false to run it")


def find_memory_problem(file: JobFile) -> Problem | None:
    """Returns a problem if the processes need more memory than is free; an unknown command's need is not known."""
    trainer, free = file.job.spec.trainer, min(_free_gb(), default=None)
    layout = max((option.layout for option in file.options), key=lambda layout: layout.hosts)
    if free is None or (trainer.entrypoint is None and trainer.command != SLICE_CHECK_COMMAND):
        return None
    per_host = trainer.torch.processes_per_host if trainer.torch is not None else 1
    processes, fitting = layout.hosts * per_host, max(1, int(free / _GB_PER_PROCESS))
    if processes <= fitting:
        return None
    generation, hosts = generations().get(layout.shape.generation), fitting // per_host
    shapes = [shape for shape in (generation.shapes if generation else ()) if shape.default and shape.hosts <= hosts]
    smaller = max(shapes, key=lambda shape: shape.chips).accelerator_type if shapes else None
    way_out = f"add --slice {smaller}" if smaller else "no slice of this generation is small enough"
    return Problem(
        "spec.slice",
        f"{count(layout.hosts, 'host')} of {layout} would be {processes} processes of some {_GB_PER_PROCESS} GB here,"
        f" and this machine has {free:.1f} GB free, enough for {fitting}; {way_out}",
    )


def _free_gb() -> Iterator[float]:
    """Yields the free memory as the machine and the container's limit have it; nothing if unknown."""
    try:
        match = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
        if match:
            yield int(match[1]) * 1024 / 1e9
        group = Path("/sys/fs/cgroup")
        most, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        if most != "max":
            yield max(0.0, (int(most) - int(used)) / 1e9)
    except (OSError, ValueError):
        return


def _omitted_parts(file: JobFile) -> list[str]:
    """Warnings about parts of the job that need a cluster."""
    trainer = file.job.spec.trainer
    volumes = [v.name for v in trainer.volumes or () if not v.model_fields_set & set(_LOCAL_VOLUMES)]
    variables = [v.name for v in trainer.env or () if v.value_from is not None]
    notes = [f"volume {name} needs a cluster and is left out here" for name in volumes]
    notes += [f"env {name} needs a cluster; here it has the value it has in your shell" for name in variables]
    if trainer.env_from:
        notes.append("envFrom needs a cluster and is left out here")
    return notes


def _result(
    file: JobFile, outcome: RunOutcome, history: tuple[bytes, str] | None, noise: MeasuredNoise | None
) -> dict[str, Any]:
    status = outcome.status
    losses, evaluations = curves_of(outcome, history)
    progress = status.progress
    ready = find(status.conditions, ConditionType.READY)
    return {
        "job": file.job.name,
        "state": "Cancelled" if outcome.cancelled else status.state,
        "message": ready.message if ready else "",
        "attempts": status.attempt,
        "resolved": file.resolution.resolved.as_json(),
        "metrics": {name: float(value) for name, value in progress.metrics.items()} if progress else {},
        "examplesPerSecond": float(progress.examples_per_second) if progress and progress.examples_per_second else None,
        "lossCurve": [{"step": step, "loss": loss} for step, loss in losses.items()],
        "evaluations": evaluations,
        "gradientNoiseScale": noise_json(noise),
        "warnings": [*file.resolution.warnings, *outcome.warnings],
        "checkpointStep": outcome.checkpoint_step,
        "bestCheckpoint": progress.best_checkpoint.as_json() if progress and progress.best_checkpoint else None,
        "restarts": status.restarts.by_class,
        "moves": [move.as_json() for move in status.placement.moves] if status.placement else [],
        "starts": [start.as_json() for start in status.starts],
        "rungs": [rung.as_json() for rung in status.rungs],
        "failure": status.last_failure.as_json() if status.last_failure else None,
        "seconds": round(outcome.seconds, 3),
        "logs": str(outcome.pods_directory),
    }


def curves_of(
    outcome: RunOutcome, history: tuple[bytes, str] | None
) -> tuple[dict[int, float | None], list[dict[str, float | None]]]:
    """Returns losses by step, and evaluations: the history's, or else the losses that the status has shown."""
    with contextlib.suppress(UnreadableHistory):
        if history is not None and (recorded := parse_history(history[0])).losses:
            evaluations = [
                # The step last: a metric of that name must not take its place.
                {plain(name): value if isfinite(value) else None for name, value in evaluation.metrics.items()}
                | {"step": evaluation.step}
                for evaluation in recorded.evaluations
            ]
            return {point.step: point.mean for point in recorded.losses}, evaluations
    return outcome.losses, []


def what_ended(status: Status) -> Iterator[str]:
    """Yields the failure of the last attempt, in lines. Without one, a gate, a deadline or the budget ended the job,
    and the lines are the status's message; an earlier attempt's failure is no reason."""
    failure, ready = status.last_failure, find(status.conditions, ConditionType.READY)
    if failure is not None and failure.attempt == status.attempt:
        after = "" if failure.step is None else f" after {count(failure.step, 'step')}"
        where = describe_place(replace(failure, node=None))
        yield f"{failure.failure_class} {'on' if failure.attempt else 'in'} {where}{after}:"
        yield from (f"  {line}" for line in failure.message.splitlines())
    elif ready is not None:
        yield ready.message


def _print_end(file: JobFile, outcome: RunOutcome, directory: Path, result: Path) -> None:
    status = outcome.status
    if outcome.cancelled:
        click.echo(f"Cancelled after {outcome.seconds:.0f} s")
    elif status.state is State.SUCCEEDED:
        click.echo(f"Succeeded in {outcome.seconds:.0f} s, {count(status.attempt, 'attempt')}")
        metrics = status.progress.metrics if status.progress else {}
        losses = outcome.losses
        if losses and [*losses.values()][-1] is None:
            # The status has no metric for a loss that is not finite.
            metrics = {"loss": "nan", **metrics}
        for name, value in metrics.items():
            click.echo(f"  {name:<10} {value}")
    else:
        click.echo(f"{status.state} after {outcome.seconds:.0f} s", err=True)
        for line in what_ended(status):
            click.echo(f"  {line}", err=True)
    for line in rung_lines(status.rungs):
        click.echo(f"  rung       {line}")
    for made in status.placement.moves if status.placement else ():
        click.echo(f"  moved      {move_words(made)}")
    for warning in (*file.resolution.warnings, *outcome.warnings):
        click.echo(f"  warning    {warning}")
    if outcome.checkpoint_step is not None:
        checkpoint = file.job.spec.checkpoint
        place = f" in {folder(file.job, checkpoint)}" if checkpoint else ""
        click.echo(f"  checkpoint step {outcome.checkpoint_step}{place}")
    if status.progress and (best := best_checkpoint(status.progress)):
        click.echo(f"  best       {best}")
    for name in WEIGHTS:
        if (directory / name).exists():
            click.echo(f"  weights    {directory / name} (safetensors.torch.load_file reads it)")
    if (directory / PAGE).exists():
        click.echo(f"  report     {directory / PAGE}")
    click.echo(f"  logs       {directory / 'pods'}/*/log.txt")
    if result.exists():
        click.echo(f"  result     {result}")
