"""A host of a TPU slice: one process per chip, started by torch_xla.launch and supervised from here.

torch_xla.launch waits for all its processes, and one that fails leaves the others in a collective that never
ends. So a replica that fails writes its outcome down and ends its process at once; the process pool then
stops the rest.
"""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import torch_xla
import torch_xla.runtime as xr

from tpu_trainer.contract import ExitCode
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.outcome import Outcome, host_outcome
from tpu_trainer.replica import run_replica
from tpu_trainer.spec import RunSpec
from tpu_trainer.stop import SharedStop, StopSignal


def run_chips(spec: RunSpec, environment: WorkerEnvironment, stop: StopSignal) -> Outcome:
    """Runs one replica per local chip and returns the host's outcome."""
    with tempfile.TemporaryDirectory(prefix="tpu-trainer-") as directory:
        folder = Path(directory)
        stop.share(folder / "stop")
        try:
            torch_xla.launch(_run_chip, args=(spec, environment, folder))
        except BrokenProcessPool:
            died = True
        else:
            died = False
        stop.unshare()
        return host_outcome(read_outcomes(folder), died)


def read_outcomes(folder: Path) -> list[Outcome]:
    """What the replicas wrote down, in the order of their places on the host."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("outcome-*.json"))]
    return [Outcome(**{**document, "code": ExitCode(document["code"])}) for document in documents]


def _run_chip(index: int, spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> None:
    """One replica, in a process of its own; on v2, v3 and XLA's CPU device in a thread of its own."""
    outcome = run_replica(spec, environment, SharedStop(folder / "stop"))
    path = folder / f"outcome-{xr.local_ordinal():04d}.json"
    # Renamed into place: a sibling's failure may end this process between two writes.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    unfinished.rename(path)
    if not outcome.well:
        os._exit(outcome.code)
