"""The process that `python -m tpu_trainer` starts, one per host: from its environment to its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from tpu_contract.protocol import ENV_PACKAGES_SHA256
from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.environment import WorkerEnvironment, check_agreement, read_environment, read_run_spec
from tpu_trainer.contract.outcome import Outcome, outcome_of, write_last_words
from tpu_trainer.contract.stop import StopSignal
from tpu_trainer.worker import tpu_host
from tpu_trainer.worker.code import install

if TYPE_CHECKING:
    from tpu_trainer.worker.replica import ReplicaRun


def main() -> int:
    """Runs this host's part of the job and returns the exit code; always leaves a termination message."""
    stop = StopSignal()
    stop.install()
    outcome = run_host(os.environ, stop)
    end(outcome)
    return outcome.code


def run_host(environ: MutableMapping[str, str], stop: StopSignal, run: ReplicaRun | None = None) -> Outcome:
    """Reads the environment and the run spec, and runs the host's replicas. Never raises. `run`: what each of them
    does, by default the training; with another the job needs no entrypoint."""
    on_tpu = False
    try:
        environment = read_environment(environ)
        spec = read_run_spec(environment.run_spec, own_loop=run is not None)
        check_agreement(environment, spec)
        import_no_device_libraries(spec)
        let_threads_sleep(spec)
        if spec.code is not None:
            install(spec.code, environment, os.environ, modules_to_import(spec))
            environment = replace(environment, packages_sha256=os.environ.get(ENV_PACKAGES_SHA256))
        if spec.hardware == "TPU":
            on_tpu = True
            # Printed first, because opening the chips may fail or hang.
            print(tpu_host.prepare(environ), flush=True)
        outcome = _run(spec, environment, stop, run)
    except Exception as error:
        outcome = outcome_of(error)
    if on_tpu and not outcome.ended_well:
        _show_logs()
    return outcome


def _run(spec: RunSpec, environment: WorkerEnvironment, stop: StopSignal, run: ReplicaRun | None) -> Outcome:
    # torch is imported only now: a wrong run spec should be reported at once.
    if spec.process_per_device:
        from tpu_trainer.worker.host import run_processes

        return run_processes(spec, environment, stop, run)
    from tpu_trainer.worker.replica import run_replica

    return run_replica(spec, environment, stop, _die_on_tpu if spec.hardware == "TPU" else die, run=run)


def import_no_device_libraries(spec: RunSpec) -> None:
    """Keeps `import torch` on a CPU from importing every device library of the image, ten seconds for TorchTPU."""
    if spec.backend == "torch" and spec.torch.device == "cpu":
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def let_threads_sleep(spec: RunSpec) -> None:
    """Keeps torch's threads on an XLA host from spinning after each operation: while a device computes, the host only
    reads, collates and traces, and its cores are for the task's workers. libgomp reads this once, with `import torch`.
    """
    if spec.backend != "torch":
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def modules_to_import(spec: RunSpec) -> Sequence[str]:
    """Returns modules that together import everything that the run's processes import."""
    return ("tpu_trainer.worker.host",) if spec.backend == "torch" else ("tpu_trainer.worker.host", "torch_xla")


def _show_logs() -> None:
    # A log that libtpu has just removed must not replace the run's own failure.
    with suppress(OSError):
        print(tpu_host.ends_of_logs(os.environ), end="", file=sys.stderr, flush=True)


def _die_on_tpu(outcome: Outcome) -> NoReturn:
    _show_logs()
    die(outcome)


def die(outcome: Outcome) -> NoReturn:
    """Ends a process whose main thread no longer answers."""
    end(outcome)
    os._exit(outcome.code)


def end(outcome: Outcome) -> None:
    """Prints the process's last line and writes its termination message."""
    print(f"{outcome.code.name}: {outcome.message}", file=sys.stdout if outcome.ended_well else sys.stderr, flush=True)
    write_last_words(outcome, first=True)
