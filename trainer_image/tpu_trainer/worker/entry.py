"""The process that `python -m tpu_trainer` starts, one per host: from its environment to its exit code."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.environment import check_agreement, read_environment, read_run_spec
from tpu_trainer.contract.outcome import Outcome, outcome_of, write_last_words
from tpu_trainer.contract.stop import StopSignal
from tpu_trainer.worker.code import install


def main() -> int:
    """Runs this host's part of the job and returns the exit code; always leaves a termination message."""
    stop = StopSignal()
    stop.install()
    outcome = run_host(os.environ, stop)
    end(outcome)
    return outcome.code


def run_host(environ: Mapping[str, str], stop: StopSignal) -> Outcome:
    """Reads the environment and the run spec, and runs the host's replicas. Never raises."""
    try:
        environment = read_environment(environ)
        spec = read_run_spec(environment.run_spec)
        check_agreement(environment, spec)
        import_no_device_libraries(spec)
        if spec.code is not None:
            install(spec.code, environment, os.environ, modules_to_import(spec))
        if spec.hardware == "TPU":
            print(_describe_rights(), flush=True)
        # torch is imported only now: a wrong run spec should be reported at once.
        if spec.process_per_device:
            from tpu_trainer.worker.host import run_processes

            return run_processes(spec, environment, stop)
        from tpu_trainer.worker.replica import run_replica

        return run_replica(spec, environment, stop, die)
    except Exception as error:
        return outcome_of(error)


def import_no_device_libraries(spec: RunSpec) -> None:
    """Keeps `import torch` on a CPU from importing every device library of the image, ten seconds for TorchTPU."""
    if spec.backend == "torch" and spec.torch.device == "cpu":
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def modules_to_import(spec: RunSpec) -> Sequence[str]:
    """Returns modules that together import everything that the run's processes import."""
    return ("tpu_trainer.worker.host",) if spec.backend == "torch" else ("tpu_trainer.worker.host", "torch_xla")


def _describe_rights() -> str:
    """Describes the rights that opening the chips needs and that only the node can change.

    It is printed first, because opening them may fail or hang.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "without limit" if soft == resource.RLIM_INFINITY else f"up to {soft // 1024} KiB"
    return f"runs as user {os.geteuid()} of group {os.getegid()}; may lock memory {locked} (RLIMIT_MEMLOCK)"


def die(outcome: Outcome) -> NoReturn:
    """Ends a process whose main thread no longer answers."""
    end(outcome)
    os._exit(outcome.code)


def end(outcome: Outcome) -> None:
    """Prints the process's last line and writes its termination message."""
    print(f"{outcome.code.name}: {outcome.message}", file=sys.stdout if outcome.ended_well else sys.stderr, flush=True)
    write_last_words(outcome, first=True)
