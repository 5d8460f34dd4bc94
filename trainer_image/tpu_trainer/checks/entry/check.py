"""`python -m tpu_trainer entry-check` imports the entrypoint, builds the task with the numbers of the slice and makes
two steps on a CPU, before anything waits for a slice.

It is replica 0 of the slice: hyperparameters, batch and data are those that this replica gets there. What only the
slice can show is not checked: its collectives, its speed. Nothing is written anywhere. Afterwards, if the operator asks
for it, the step is compiled for the slice (`checks.compile.pod`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from tpu_trainer.checks.entry.places import places_of
from tpu_trainer.contract.environment import read_environment
from tpu_trainer.contract.outcome import Outcome, outcome_of
from tpu_trainer.contract.protocol import ENV_COMPILE_SECONDS, ExitCode
from tpu_trainer.contract.spec import ReportSpec, RunSpec, TorchSpec, read_run_spec
from tpu_trainer.contract.stop import StopSignal
from tpu_trainer.worker.code import install
from tpu_trainer.worker.entry import die, end, import_no_device_libraries, imported_by


def main() -> int:
    """Runs the check and returns its exit code; always leaves a termination message."""
    stop = StopSignal()
    stop.install()
    outcome = run_check(os.environ, stop)
    if outcome.code is ExitCode.Succeeded and os.environ.get(ENV_COMPILE_SECONDS):
        from tpu_trainer.checks.compile.pod import become, lacking

        if (cannot := lacking(outcome)) is None:
            become(outcome)
        outcome = cannot
    end(outcome)
    return outcome.code


def run_check(environ: Mapping[str, str], stop: StopSignal) -> Outcome:
    """Never raises."""
    try:
        environment = read_environment(environ)
        given = read_run_spec(environment.run_spec)
        spec = on_cpu(given)
        import_no_device_libraries(spec)
        if given.code is not None:
            # By the run's own backend: what only its processes import would fail on the slice.
            install(given.code, environment, os.environ, imported_by(given))
        # It reports to nobody, and leaves nothing but its last words.
        alone = replace(environment, host_index=0, progress_file=None, report_directory=None, progress_service=None)
        # As in `entry`, torch is imported only now: a wrong run spec should be reported at once.
        from tpu_trainer.checks.entry.first_steps import run_first_steps

        outcome = run_first_steps(spec, alone, stop, die)
        return replace(outcome, places=places_of(given)) if outcome.code is ExitCode.Succeeded else outcome
    except Exception as error:
        return outcome_of(error)


def on_cpu(spec: RunSpec) -> RunSpec:
    """The same training on one CPU, without anything that is kept."""
    backend = "torch" if spec.backend == "torch" else "xla"
    torch = TorchSpec("cpu", "gloo", 1)
    alone = replace(spec, hardware="CPU", backend=backend, torch=torch, sharding="Replicated")
    return replace(alone, checkpoint=None, report=ReportSpec())
