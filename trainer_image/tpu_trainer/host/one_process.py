"""What each of a host's processes does, and the file in which it leaves its outcome for the supervisor, `processes`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from tpu_trainer.contract import ExitCode
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.outcome import Outcome
from tpu_trainer.replica import run_replica
from tpu_trainer.spec import RunSpec
from tpu_trainer.stop import SharedStop


def stop_file(folder: Path) -> Path:
    """Exists once the host has been told to stop."""
    return folder / "stop"


def outcome_file(folder: Path, local_rank: int) -> Path:
    """Exists once that replica has ended in an orderly way."""
    return folder / f"outcome-{local_rank:04d}.json"


def run_one(spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> None:
    """Runs replica `environment.local_rank`. A failed one ends its process, so that the supervisor stops the rest."""

    def leave(outcome: Outcome) -> NoReturn:
        write_outcome(outcome, folder, environment.local_rank)
        os._exit(outcome.code)

    outcome = run_replica(spec, environment, SharedStop(stop_file(folder)), leave)
    if not outcome.well:
        leave(outcome)
    write_outcome(outcome, folder, environment.local_rank)


def write_outcome(outcome: Outcome, folder: Path, local_rank: int) -> None:
    path = outcome_file(folder, local_rank)
    # Renamed into place: a sibling's failure may end this process between two writes.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    unfinished.rename(path)


def read_outcomes(folder: Path) -> list[Outcome]:
    """What the processes have left, in the order of their places on the host."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("outcome-*.json"))]
    return [Outcome(**{**document, "code": ExitCode(document["code"])}) for document in documents]
