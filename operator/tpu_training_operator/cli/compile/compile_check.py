"""`tpujob compile-check` compiles a job's step with the TPU's compiler, on a machine without a TPU.

The trainer traces and compiles in its own process (`python -m tpu_trainer compile-check`); this prints its answer and
the bounds that follow from the peaks of the slice.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import click

from tpu_contract.protocol import ENV_PACKAGES, PackageSource
from tpu_contract.run_spec import Loop
from tpu_training_operator.api.slice import V2_NEEDS_CPU
from tpu_training_operator.api.trainer import BackendName
from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.code.option import code_option, code_problem, module_paths
from tpu_training_operator.cli.common.changes import apply_options, set_option, slice_option
from tpu_training_operator.cli.common.errors import BadInput, CommandError, VerdictCommand
from tpu_training_operator.cli.common.job_file import JobFile, filename_option, load, with_uid
from tpu_training_operator.cli.common.terminal import print_document
from tpu_training_operator.cli.compile.compile_report import SliceCheck, as_json, print_check, print_comparison
from tpu_training_operator.cli.plan.moved import moved
from tpu_training_operator.domain.job.options import other_programs
from tpu_training_operator.domain.job.recipe.compile_results import CompileResult
from tpu_training_operator.domain.job.recipe.cost import AT_BEST, Cost, StepTime, cost_of
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.trainer_report import CompiledStep
from tpu_training_operator.domain.objects.run_spec import run_spec

_DOES_NOT_FIT = 1
_FLAGS = ("LIBTPU_INIT_ARGS", "XLA_")


@dataclass(frozen=True)
class CompileRequest:
    """A job to compile. `shows_progress`: whether progress is printed to stderr."""

    file: JobFile
    python_path: list[Path]
    shows_progress: bool


@click.command(cls=VerdictCommand)
@filename_option
@slice_option
@set_option
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--largest", is_flag=True, help="Find the largest batch per replica that fits, even if the job's fits.")
@click.option("--compare", metavar="TYPE,TYPE,...", help="Check these accelerator types, side by side.")
@code_option
def compile_check(
    filename: Path,
    on_slice: str | None,
    values: tuple[str, ...],
    output: str,
    largest: bool,
    compare: str | None,
    code: Path | None,
) -> None:
    """Compile a job's step for its slice without a TPU: whether it fits, and its speed at best.

    Exit status: 0 if it fits on every requested slice and on the job's alternatives, 1 if it does not fit or
    cannot be compiled as a single program, 2 if the check gives no answer.
    """

    def change(body: dict[str, Any]) -> None:
        apply_options(body, values, on_slice)
        if isinstance(body.get("spec"), dict) and isinstance(body["spec"].get("trainer"), dict):
            body["spec"]["trainer"].setdefault("image", "none")
            if code is not None:
                body["spec"]["trainer"].pop("code", None)

    file = load(filename, except_rules=(V2_NEEDS_CPU,), change=change)
    python_path = module_paths(file, code)
    if (problem := _unsupported_problem(file) or code_problem(file, code, python_path)) is not None:
        raise BadInput(filename, [problem])
    request = CompileRequest(file, python_path, shows_progress=output == "table")
    checked = (
        _check_job(request, largest=largest) if compare is None else _check_types(request, compare, largest=largest)
    )
    if output == "json":
        documents = [as_json(check) for check in checked]
        print_document(documents[0] if compare is None else documents, output)
    else:
        if compare is None:
            print_check(file, checked[0])
        else:
            print_comparison(file, checked)
    if not all(check.all_fit for check in checked):
        sys.exit(_DOES_NOT_FIT)


def _unsupported_problem(file: JobFile) -> Problem | None:
    """Returns why the trainer cannot compile the job's step; None if it can."""
    trainer = file.job.spec.trainer
    if trainer.entrypoint is None:
        return Problem("spec.trainer.command", "the check traces the trainer's own loop; it cannot trace a command")
    if trainer.loop is Loop.LIGHTNING:
        return Problem("spec.trainer.loop", "the check traces the trainer's own loop, not Lightning's")
    stands_for_slices = file.job.spec.slice.count > 1 and trainer.backend is BackendName.XLA_SPMD
    if trainer.backend is not BackendName.XLA and not stands_for_slices:
        instead = "add --set trainer.backend=XLA to check a replica's step"
        message = f"the check compiles the step of backend XLA, not {trainer.backend}; {instead}"
        return Problem("spec.trainer.backend", message)
    return None


def _check_job(request: CompileRequest, *, largest: bool) -> list[SliceCheck]:
    """Checks the job on its own slice and on its alternatives."""
    preferred = _check_slice(request, request.file.resolution, largest=largest)
    elsewhere = other_programs(request.file.options[0], request.file.options)
    others = (_check_slice(request, option.resolution, largest=False) for option in elsewhere)
    return [replace(preferred, others=tuple(others))]


def _check_types(request: CompileRequest, compare: str, *, largest: bool) -> list[SliceCheck]:
    """Checks the job on the accelerator types that `compare` lists."""
    return [_check_slice(request, on, largest=largest) for on in moved(request.file, compare.split(","), "--compare")]


def _check_slice(request: CompileRequest, resolution: Resolution, *, largest: bool) -> SliceCheck:
    if request.shows_progress:
        click.echo(f"compiling for {resolution.layout} ...", err=True)
    answer = ask(request, resolution, largest=largest)
    result = CompileResult(resolution.layout, CompiledStep.model_validate(answer))
    return SliceCheck(resolution, answer, result, _cost(resolution, result))


def _cost(resolution: Resolution, result: CompileResult) -> Cost | None:
    if result.bound is None:
        return None
    return cost_of(resolution, [StepTime.of(resolution, result.bound.seconds, AT_BEST)])


def ask(request: CompileRequest, resolution: Resolution, *, largest: bool) -> dict[str, Any]:
    """Returns the trainer's answer. Raises CommandError if there is none."""
    file, python_path = request.file, request.python_path
    job = with_uid(file.job)
    job_env = {variable.name: variable.value for variable in job.spec.trainer.env or () if variable.value is not None}
    shell = {name: value for name, value in os.environ.items() if not name.startswith(_FLAGS)}
    paths = [*map(str, python_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="tpujob-") as name:
        spec, written = Path(name) / "runspec.json", Path(name) / "answer.json"
        spec.write_text(json.dumps(run_spec(job, resolution, 1)), encoding="utf-8")
        cache = _cache_folder()
        options = ["--run-spec", str(spec), "--output", str(written), *(["--largest"] if largest else [])]
        options += [] if cache is None else ["--cache", str(cache)]
        exit_code = _run_stoppable(
            [sys.executable, "-m", "tpu_trainer", "compile-check", *options],
            # A worker runs code in its folder.
            cwd=python_path[0] if len(python_path) == 1 else None,
            # The flags of compiler and torch_xla are the job's, not those of this shell.
            env={
                **shell,
                **job_env,
                "PYTHONPATH": os.pathsep.join(paths),
                ENV_PACKAGES: PackageSource.INSTALLED,
            },
            # The search for the largest batch prints each try, which may take minutes.
            stdout=sys.stderr if request.shows_progress else subprocess.DEVNULL,
        )
        if not written.exists():
            raise CommandError(
                f"compile-check: the trainer's process ended with exit code {exit_code} and without an answer"
            )
        answer: dict[str, Any] = json.loads(written.read_bytes())
    if "trouble" in answer:
        raise CommandError(answer["said"])
    return answer


def _cache_folder() -> Path | None:
    """Returns the folder where the compiler's answers are kept; None for a user without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # Its standard has a relative path ignored.
        return (named if named.is_absolute() else Path.home() / ".cache") / "tpujob" / "compiled"
    except RuntimeError:
        return None


def _run_stoppable(command: list[str], *, cwd: Path | None, env: dict[str, str], stdout: int | TextIO) -> int:
    """Runs a process and returns its exit code. SIGTERM ends it before it ends this one, with SystemExit.

    A handler that raised while the process is being started would leave it running.
    """
    process: subprocess.Popen[bytes] | None = None
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        if process is not None:
            process.kill()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        # The answer repeats what the trainer writes to stderr.
        silent = subprocess.DEVNULL
        process = subprocess.Popen(  # noqa: S603 - this Python, with files of our own
            command, cwd=cwd, env=env, stdin=silent, stdout=stdout, stderr=silent
        )
        with process:
            if is_stopped:
                process.kill()
            exit_code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_stopped:
        sys.exit(128 + signal.SIGTERM)
    return exit_code
