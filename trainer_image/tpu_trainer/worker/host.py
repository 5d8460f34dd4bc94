"""Starts, supervises and ends a host's replicas where each device has a process.

torch_xla.launch starts them on TPU; for the torch backend `_launch_torch` does, as torchrun would. Either way the
supervisor has three duties. A replica that fails would leave the others in a collective that never ends, so it records
its outcome and ends its process at once, and the supervisor stops the rest. A request to stop reaches only the
supervisor, which passes it on through a file. On host 0 the supervisor keeps the store at which all processes meet, so
that it outlives any of them.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

import torch

from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.contract.outcome import Outcome, host_outcome
from tpu_trainer.contract.stop import SharedStop, StopSignal
from tpu_trainer.gang.backends.rendezvous import serve
from tpu_trainer.gang.backends.torch_xla_import import import_torch_xla
from tpu_trainer.worker.replica import ReplicaRun, run_replica

_PR_SET_PDEATHSIG = 1
_LEFT_EARLY = Outcome(
    ExitCode.UserError,
    "a replica's process exited with code 0 before the training had ended: something in the task called os._exit",
)


def run_processes(
    spec: RunSpec, environment: WorkerEnvironment, stop: StopSignal, run: ReplicaRun | None = None
) -> Outcome:
    """Runs one replica per device of this host and returns the host's outcome. `run`: as in `run_replica`.

    Raises:
        PeerLostError: the store could not be opened at MASTER_ADDR:MASTER_PORT.
        BadSpecError: the devices found are not the run spec's.
    """
    environment = replace(environment, host_process=os.getpid())
    launch = _launch_torch if spec.backend == "torch" else _launch_per_chip
    with tempfile.TemporaryDirectory(prefix="tpu-trainer-") as directory:
        folder = Path(directory)
        stop.share(_stop_file(folder))
        try:
            if environment.num_hosts == 1:
                environment = replace(environment, master_addr="localhost", master_port=0)
            # Held until the last process has ended.
            store = serve(environment, spec.job.gang, spec.slice.replicas) if environment.host_index == 0 else None
            if store is not None:
                environment = replace(environment, master_port=store.port)
            died = launch(spec, environment, folder, run)
        finally:
            stop.unshare()
        return host_outcome(_read_outcomes(folder), died)


def _launch_per_chip(spec: RunSpec, environment: WorkerEnvironment, folder: Path, run: ReplicaRun | None) -> bool:
    """Runs one process per chip until all have ended; returns whether one died, after which the pool stops the rest."""
    import_torch_xla()
    import torch_xla

    try:
        torch_xla.launch(_run_chip, args=(spec, environment, folder, run))
    except BrokenProcessPool:
        return True
    return False


def _run_chip(
    ordinal: int, spec: RunSpec, environment: WorkerEnvironment, folder: Path, run: ReplicaRun | None
) -> None:
    """Runs one replica, in its own process; on v2, v3 and XLA's CPU device in its own thread."""
    import torch_xla.runtime as xr

    _run_local_replica(spec, replace(environment, local_rank=xr.local_ordinal()), folder, run)


def _launch_torch(spec: RunSpec, environment: WorkerEnvironment, folder: Path, run: ReplicaRun | None) -> bool:
    """Runs one process per device until all have ended; returns whether one died, after which the rest are killed.

    Raises:
        BadSpecError: TorchTPU finds a slice that is not the run spec's.
    """
    count = spec.torch.processes_per_host
    if spec.torch.device == "tpu":
        _lay_out_slice(environment, count)
    context = multiprocessing.get_context("spawn")
    processes = []
    for local_rank in range(count):
        # torchrun's variables, for device libraries that look for their place before this package's code runs.
        os.environ.update(
            RANK=str(environment.host_index * count + local_rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(environment.num_hosts * count),
            LOCAL_WORLD_SIZE=str(count),
        )
        place = replace(environment, local_rank=local_rank)
        processes.append(context.Process(target=_run_torch, args=(spec, place, folder, run, os.getpid())))
        processes[-1].start()
    died, running = False, set(processes)
    while running:
        wait([process.sentinel for process in running])
        ended = {process for process in running if not process.is_alive()}
        running -= ended
        # A process that leaves in the middle of the training, whatever its exit code, records no outcome.
        silent = [
            local_rank
            for local_rank, process in enumerate(processes)
            if process in ended and process.exitcode == 0 and not _outcome_file(folder, local_rank).exists()
        ]
        for local_rank in silent:
            _write_outcome(_LEFT_EARLY, folder, local_rank)
        if died or not (silent or any(process.exitcode for process in ended)):
            continue
        died = True
        for local_rank, process in enumerate(processes):
            if process in running:
                process.kill()
            elif process.exitcode is not None and process.exitcode < 0:
                name = signal.Signals(-process.exitcode).name
                why = f"a replica's process was ended by {name}: out of memory, or crashed natively"
                _write_outcome(Outcome(ExitCode.InternalError, why), folder, local_rank)
    return died


def _run_torch(
    spec: RunSpec, environment: WorkerEnvironment, folder: Path, run: ReplicaRun | None, supervisor: int
) -> None:
    _end_with(supervisor)
    # A terminal's Ctrl-C goes to every process, but only the supervisor's file counts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _run_local_replica(spec, environment, folder, run)


def _end_with(parent: int) -> None:
    """Ends this replica when its supervisor is killed. Otherwise it would train on, and save beside its successor.

    In a container the kernel does so anyway.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The supervisor may have ended before this call.
    if os.getppid() != parent:
        os._exit(ExitCode.InternalError)


def _lay_out_slice(environment: WorkerEnvironment, count: int) -> None:
    """Lets TorchTPU decide, in the parent, what all processes must agree on. Variables that are set stay as they are.

    The operator sets the host's rank: a process listens at the address of its rank in the list of all processes, which
    is in the order of the hosts' names. If TorchTPU is missing, nothing is laid out, and the processes say so.
    """
    with suppress(ModuleNotFoundError):
        importlib.import_module("torch_tpu")
        try:
            torch.tpu.distributed.set_tpu_launch_env(  # type: ignore[attr-defined]
                nnodes=environment.num_hosts, nproc_per_node=count
            )
        except (ValueError, RuntimeError) as error:
            raise BadSpecError(f"trainer.torch.device: TorchTPU cannot lay out the slice: {error}") from error


def _run_local_replica(spec: RunSpec, environment: WorkerEnvironment, folder: Path, run: ReplicaRun | None) -> None:
    """Runs replica `environment.local_rank`. If it fails it ends its process, so that the supervisor stops the rest."""

    def leave(outcome: Outcome) -> NoReturn:
        _write_outcome(outcome, folder, environment.local_rank)
        os._exit(outcome.code)

    outcome = run_replica(spec, environment, SharedStop(_stop_file(folder)), leave, run=run)
    if not outcome.ended_well:
        leave(outcome)
    _write_outcome(outcome, folder, environment.local_rank)


def _stop_file(folder: Path) -> Path:
    """Returns the path of a file that exists once the host has been asked to stop."""
    return folder / "stop"


def _outcome_file(folder: Path, local_rank: int) -> Path:
    """Returns the path of a file that exists once that replica has ended in an orderly way."""
    return folder / f"outcome-{local_rank:04d}.json"


def _write_outcome(outcome: Outcome, folder: Path, local_rank: int) -> None:
    path = _outcome_file(folder, local_rank)
    # Renamed into place: a sibling's failure may end this process between two writes.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    unfinished.rename(path)


def _read_outcomes(folder: Path) -> list[Outcome]:
    """Reads the outcomes that the processes have recorded, in the order of their places on the host."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("outcome-*.json"))]
    return [Outcome(**{**document, "code": ExitCode(document["code"])}) for document in documents]
