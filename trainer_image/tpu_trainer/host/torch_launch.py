"""A process per device of the torch backend, as torchrun would start them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import torch

from tpu_trainer.contract import ExitCode
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.errors import BadSpecError
from tpu_trainer.host.one_process import outcome_file, run_one, write_outcome
from tpu_trainer.outcome import Outcome
from tpu_trainer.spec import RunSpec


def launch(spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> bool:
    """Returns, once all have ended, whether one ended before its time; the rest are then killed.

    Raises:
        BadSpecError: TorchTPU finds another slice than the run spec speaks of.
    """
    count = spec.torch.processes_per_host
    if spec.torch.device == "tpu":
        _lay_out_slice(environment, count)
    context = multiprocessing.get_context("spawn")
    processes = []
    for local_rank in range(count):
        # torchrun's variables, for device libraries that look for their place before any code of this package runs.
        os.environ.update(_place(environment, local_rank, count))
        own = replace(environment, local_rank=local_rank)
        processes.append(context.Process(target=_run, args=(spec, own, folder)))
        processes[-1].start()
    died, running = False, set(processes)
    while running:
        wait([process.sentinel for process in running])
        ended = {process for process in running if not process.is_alive()}
        running -= ended
        # One that leaves in the middle of the training, with whatever code, leaves no outcome.
        silent = [
            local_rank
            for local_rank, process in enumerate(processes)
            if process in ended and process.exitcode == 0 and not outcome_file(folder, local_rank).exists()
        ]
        for local_rank in silent:
            write_outcome(_LEFT_EARLY, folder, local_rank)
        if died or not (silent or any(process.exitcode for process in ended)):
            continue
        died = True
        for local_rank, process in enumerate(processes):
            if process in running:
                process.kill()
            elif process.exitcode is not None and process.exitcode < 0:
                write_outcome(_killed(-process.exitcode), folder, local_rank)
    return died


def _run(spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> None:
    # A terminal's Ctrl-C goes to every process; the supervisor's file is what counts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    run_one(spec, environment, folder)


def _place(environment: WorkerEnvironment, local_rank: int, count: int) -> dict[str, str]:
    places = {
        "RANK": environment.host_index * count + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": environment.num_hosts * count,
        "LOCAL_WORLD_SIZE": count,
    }
    return {name: str(value) for name, value in places.items()}


def _lay_out_slice(environment: WorkerEnvironment, count: int) -> None:
    """Lets TorchTPU decide, in the parent, what all processes must agree on; variables that are set stay as they are.

    Where TorchTPU is missing nothing is laid out, and the processes say so.
    """
    os.environ.setdefault("NODE_RANK", str(environment.host_index))
    with suppress(ModuleNotFoundError):
        importlib.import_module("torch_tpu")
        try:
            torch.tpu.distributed.set_tpu_launch_env(  # type: ignore[attr-defined]
                nnodes=environment.num_hosts, nproc_per_node=count
            )
        except ValueError as error:
            raise BadSpecError(f"trainer.torch.device: TorchTPU cannot lay out the slice: {error}") from error


_LEFT_EARLY = Outcome(
    ExitCode.UserError,
    "a replica's process exited with code 0 before the training had ended: something in the task ended the process "
    "(os._exit)",
)


def _killed(number: int) -> Outcome:
    """The words of a process that could not leave any."""
    why = f"a replica's process was ended by {signal.Signals(number).name}: out of memory, or crashed natively"
    return Outcome(ExitCode.InternalError, why)
