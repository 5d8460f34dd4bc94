"""A host whose replicas are processes of their own, one per device, supervised from here. Called by `entry`.

Two things start them: torch_xla.launch on TPU, and this module itself for the torch backend. What a supervisor owes is
the same. One replica that fails would leave the others in a collective that never ends, so it writes its outcome down
and ends its process at once, and the rest are stopped. A request to stop reaches the supervisor only; a file carries it
on. And the store at which all processes meet is kept here on host 0, so that it outlives any of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from tpu_trainer.backends.rendezvous import serve
from tpu_trainer.contract import ExitCode
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.outcome import Outcome, host_outcome
from tpu_trainer.replica import run_replica
from tpu_trainer.spec import RunSpec
from tpu_trainer.stop import SharedStop, StopSignal


def needs_processes(spec: RunSpec) -> bool:
    """Whether a host of this run is more than one process, or may be: how many chips there are, only PJRT knows."""
    if spec.backend == "torch":
        return spec.torch.processes_per_host > 1
    return spec.backend == "xla" and spec.hardware == "TPU"


def run_processes(spec: RunSpec, environment: WorkerEnvironment, stop: StopSignal) -> Outcome:
    """Runs one replica per device of this host and returns the host's outcome.

    Raises:
        PeerLostError: the store could not be opened at MASTER_ADDR:MASTER_PORT.
    """
    launch = _launch_torch if spec.backend == "torch" else _launch_chips
    with tempfile.TemporaryDirectory(prefix="tpu-trainer-") as directory:
        folder = Path(directory)
        stop.share(folder / "stop")
        if environment.num_hosts == 1:
            environment = replace(environment, master_addr="localhost", master_port=0)
        # Held until the last process has ended.
        store = serve(environment) if environment.host_index == 0 else None
        if store is not None:
            environment = replace(environment, master_port=store.port)
        died = launch(spec, environment, folder)
        stop.unshare()
        return host_outcome(read_outcomes(folder), died)


def read_outcomes(folder: Path) -> list[Outcome]:
    """What the replicas wrote down, in the order of their places on the host."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("outcome-*.json"))]
    return [Outcome(**{**document, "code": ExitCode(document["code"])}) for document in documents]


def _launch_chips(spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> bool:
    """Returns, once all have ended, whether one ended before its time; the process pool then stops the rest."""
    import torch_xla

    try:
        torch_xla.launch(_run_chip, args=(spec, environment, folder))
    except BrokenProcessPool:
        return True
    return False


def _run_chip(ordinal: int, spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> None:
    """One replica, in a process of its own; on v2, v3 and XLA's CPU device in a thread of its own."""
    import torch_xla.runtime as xr

    _run(spec, replace(environment, local_rank=xr.local_ordinal()), folder)


def _launch_torch(spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> bool:
    """As for chips, with processes started here."""
    context = multiprocessing.get_context("spawn")
    count = spec.torch.processes_per_host
    placed = [replace(environment, local_rank=local_rank) for local_rank in range(count)]
    processes = [context.Process(target=_run_torch, args=(spec, place, folder)) for place in placed]
    for local_rank, process in enumerate(processes):
        # What torchrun would set, for device libraries that look for their place before any code of this package runs.
        os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(count))
        process.start()
    died, running = False, set(processes)
    while running:
        wait([process.sentinel for process in running])
        ended = {process for process in running if not process.is_alive()}
        running -= ended
        for local_rank, process in enumerate(processes):
            if process in ended and process.exitcode and process.exitcode < 0 and not died:
                _write(_killed(-process.exitcode), folder, local_rank)
        if any(process.exitcode for process in ended) and not died:
            died = True
            for process in running:
                process.kill()
    return died


def _killed(number: int) -> Outcome:
    """The words of a process that could not leave any."""
    why = f"a replica's process was ended by {signal.Signals(number).name}: out of memory, or crashed natively"
    return Outcome(ExitCode.InternalError, why)


def _run_torch(spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> None:
    # A terminal's Ctrl-C goes to every process; the supervisor's file is what counts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _run(spec, environment, folder)


def _run(spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> None:
    leave = _leaving(folder, environment.local_rank)
    outcome = run_replica(spec, environment, SharedStop(folder / "stop"), leave)
    if not outcome.well:
        leave(outcome)
    _write(outcome, folder, environment.local_rank)


def _leaving(folder: Path, local_rank: int) -> Callable[[Outcome], NoReturn]:
    """The end of a replica that cannot go on: its outcome, and its process at once."""

    def leave(outcome: Outcome) -> NoReturn:
        _write(outcome, folder, local_rank)
        os._exit(outcome.code)

    return leave


def _write(outcome: Outcome, folder: Path, local_rank: int) -> None:
    path = folder / f"outcome-{local_rank:04d}.json"
    # Renamed into place: a sibling's failure may end this process between two writes.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    unfinished.rename(path)
