"""A whole run of one replica inside the test's own process, on the torch backend: no process to wait for.

What a signal, an exit code or another host does needs `gang`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from tests.trainer.recorded import Recorded, recorded
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.stop import SharedStop
from tpu_trainer.reporting import reporter
from tpu_trainer.reporting.progress import ProgressLog
from tpu_trainer.worker import replica

_version = functools.cache(importlib.metadata.version)
"""Reads the version of a package once: that of all a report names takes as long as many a training."""


@dataclass(frozen=True)
class Run:
    outcome: Outcome
    recorded: Recorded
    warnings: list[str]

    @property
    def losses(self) -> list[float]:
        return self.recorded.losses

    @property
    def evaluations(self) -> list[dict[str, float]]:
        return self.recorded.evaluations


def run(document: dict[str, Any], directory: Path, report: Path | None = None) -> Run:
    """`document`: a run spec for one host; `report`: for what a run at the desk leaves, by default below
    `directory`. A report.uri must be a directory."""
    if report is None:
        report = directory / "reports"
        (report / "history.json").unlink(missing_ok=True)
    environment = WorkerEnvironment(
        run_spec=directory / "run.json",
        host_index=0,
        num_hosts=1,
        master_addr="",
        master_port=0,
        report_directory=report,
    )
    # Tiny tensors: more threads would only wait for each other.
    torch.set_num_threads(1)
    spec = parse_run_spec(document)
    log = ProgressLog(spec.last_step, silent=False)
    with mock.patch.object(replica, "ProgressLog", return_value=log), mock.patch.object(reporter, "version", _version):
        outcome = replica.run_replica(spec, environment, SharedStop(directory / "stop"), _hung)
    return Run(outcome, recorded(Path(document.get("report", {}).get("uri") or report)), [*log.warnings])


def _hung(outcome: Outcome) -> NoReturn:
    raise AssertionError(outcome.message)
