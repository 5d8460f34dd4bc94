"""A whole run of one replica inside the test's own process, on the torch backend: no process to wait for.

What a signal, an exit code or another host does needs `gang`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.spec import parse_run_spec
from tpu_trainer.contract.stop import SharedStop
from tpu_trainer.worker.replica import run_replica


@dataclass(frozen=True)
class Run:
    """`records`: the lines of the progress file."""

    outcome: Outcome
    records: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [loss for record in self.records for loss in record["losses"]]

    @property
    def warnings(self) -> list[str]:
        return self.records[-1]["warnings"]

    @property
    def evaluations(self) -> list[dict[str, float]]:
        return [record["evaluation"] for record in self.records if "evaluation" in record]


def run(document: dict[str, Any], directory: Path, report: Path | None = None) -> Run:
    """`document`: a run spec for one host; `directory`: for the progress file; `report`: for what a run at the desk
    leaves."""
    progress = directory / "progress.jsonl"
    progress.unlink(missing_ok=True)
    environment = WorkerEnvironment(
        run_spec=directory / "run.json",
        host_index=0,
        num_hosts=1,
        master_addr="",
        master_port=0,
        progress_file=progress,
        report_directory=report,
    )
    # Tiny tensors: more threads would only wait for each other.
    torch.set_num_threads(1)
    outcome = run_replica(parse_run_spec(document), environment, SharedStop(directory / "stop"), _hung)
    return Run(outcome, [json.loads(line) for line in progress.read_text().splitlines()])


def _hung(outcome: Outcome) -> NoReturn:
    raise AssertionError(outcome.message)
