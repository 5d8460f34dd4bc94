"""A process per TPU chip, started by torch_xla.launch."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import torch_xla
import torch_xla.runtime as xr

from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.host.one_process import run_one
from tpu_trainer.spec import RunSpec


def launch(spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> bool:
    """Returns, once all have ended, whether one ended before its time; the process pool then stops the rest."""
    try:
        torch_xla.launch(_run_chip, args=(spec, environment, folder))
    except BrokenProcessPool:
        return True
    return False


def _run_chip(ordinal: int, spec: RunSpec, environment: WorkerEnvironment, folder: Path) -> None:
    """One replica, in a process of its own; on v2, v3 and XLA's CPU device in a thread of its own."""
    run_one(spec, replace(environment, local_rank=xr.local_ordinal()), folder)
