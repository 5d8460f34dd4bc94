"""The process that `python -m tpu_trainer` starts: one per host, whatever runs inside it.

It is the only place that knows of exit codes and of the termination message.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tpu_trainer.contract import ENV_TERMINATION_LOG
from tpu_trainer.environment import check_agreement, read_environment
from tpu_trainer.outcome import Outcome, outcome_of
from tpu_trainer.spec import read_run_spec
from tpu_trainer.stop import StopSignal
from tpu_trainer.termination import write_termination


def main() -> int:
    """Runs this host's part of the job and returns the exit code; leaves the termination message in every case."""
    stop = StopSignal()
    stop.install()
    outcome = run_host(os.environ, stop)
    _last_words(outcome, os.environ)
    return outcome.code


def run_host(environ: Mapping[str, str], stop: StopSignal) -> Outcome:
    """Reads what the host was given and runs its replicas. Never raises."""
    try:
        environment = read_environment(environ)
        spec = read_run_spec(environment.run_spec)
        check_agreement(environment, spec)
        if spec.hardware == "TPU":
            print(_rights(), flush=True)
        # torch is imported only now: what is wrong with the run spec should be said at once.
        if spec.process_per_device:
            from tpu_trainer.host.processes import run_processes

            return run_processes(spec, environment, stop)
        from tpu_trainer.replica import run_replica

        return run_replica(spec, environment, stop, _die)
    except Exception as error:
        return outcome_of(error)


def _rights() -> str:
    """What opening the chips depends on and only the node can change: said before it may fail or hang."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "without limit" if soft == resource.RLIM_INFINITY else f"up to {soft // 1024} KiB"
    return f"runs as user {os.geteuid()} of group {os.getegid()}; may lock memory {locked} (RLIMIT_MEMLOCK)"


def _die(outcome: Outcome) -> NoReturn:
    """The end of a process whose main thread no longer answers."""
    _last_words(outcome, os.environ)
    os._exit(outcome.code)


def _last_words(outcome: Outcome, environ: Mapping[str, str]) -> None:
    print(f"{outcome.code.name}: {outcome.message}", file=sys.stdout if outcome.well else sys.stderr, flush=True)
    path = environ.get(ENV_TERMINATION_LOG)
    if not path:
        return
    try:
        write_termination(Path(path), outcome)
    except OSError as error:
        print(f"{ENV_TERMINATION_LOG} {path}: cannot be written: {error.strerror}", file=sys.stderr, flush=True)
