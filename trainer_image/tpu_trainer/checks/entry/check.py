"""`python -m tpu_trainer entry-check` imports the entrypoint, builds the task with the numbers of the slice and makes
two steps on a CPU, before anything waits for a slice.

The process stands for replica 0 of the slice: it gets that replica's hyperparameters, batch and data. Only the slice
can show its collectives and its speed, so these are not checked. Nothing is written anywhere. Afterwards,
if the operator asks for it, the process becomes a compile check (`checks.compile.command`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from tpu_contract.protocol import ENV_COMPILE_SECONDS, ExitCode
from tpu_contract.run_spec import ReportSpec, RunSpec, TorchSpec
from tpu_trainer.checks.entry.places import find_places
from tpu_trainer.contract.environment import read_environment, read_run_spec
from tpu_trainer.contract.outcome import Outcome, outcome_of
from tpu_trainer.contract.stop import StopSignal
from tpu_trainer.worker.code import install
from tpu_trainer.worker.entry import die, end, import_no_device_libraries, modules_to_import


def main() -> int:
    """Runs the check and returns its exit code; always leaves a termination message."""
    stop = StopSignal()
    stop.install()
    outcome = run_check(os.environ, stop)
    if outcome.code is ExitCode.Succeeded and os.environ.get(ENV_COMPILE_SECONDS):
        from tpu_trainer.checks.compile.command import become_compile_check

        become_compile_check(outcome)
    end(outcome)
    return outcome.code


def run_check(environ: Mapping[str, str], stop: StopSignal) -> Outcome:
    """Reads the environment and the run spec, and makes the first steps. Never raises."""
    try:
        environment = read_environment(environ)
        job_spec = read_run_spec(environment.run_spec)
        spec = on_cpu(job_spec)
        import_no_device_libraries(spec)
        if job_spec.code is not None:
            # With the modules of the job's own backend, since a folder that hides one of them would fail on the slice.
            install(job_spec.code, environment, os.environ, modules_to_import(job_spec))
        # It sends no reports, and leaves nothing but a termination message.
        alone = replace(environment, host_index=0, report_directory=None, progress_service=None)
        # As in `entry`, torch is imported only now: a wrong run spec should be reported at once.
        from tpu_trainer.checks.entry.first_steps import run_first_steps

        outcome = run_first_steps(spec, alone, stop, die)
        return replace(outcome, places=find_places(job_spec)) if outcome.code is ExitCode.Succeeded else outcome
    except Exception as error:
        return outcome_of(error)


def on_cpu(spec: RunSpec) -> RunSpec:
    """Returns the same training on one CPU, without checkpoints and reports."""
    backend = "torch" if spec.backend == "torch" else "xla"
    torch = TorchSpec("cpu", "gloo", 1)
    alone = replace(spec, hardware="CPU", backend=backend, torch=torch, sharding="Replicated")
    return replace(alone, checkpoint=None, report=ReportSpec())
