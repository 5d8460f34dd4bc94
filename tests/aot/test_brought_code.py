"""`compile-check` of code that the job brings along, with accumulated gradients: two programs make its step. The
loss is read in all steps but the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.aot.test_step_on_a_chip import CHIPS, run_spec
from tests.trainer.gang_processes import ROOT, Launcher
from tests.trainer.worker.test_archive import file, packed
from tests.trainer.worker.test_code import code_of

WIDTH, BATCH, PASSES = 8, 16, 3
SOURCE = f"""
from itertools import count
import torch
from torch.utils.data import TensorDataset
from tpu_trainer import Task

calls = count()

def loss(model, batch):
    found = (model(batch[0]) - batch[1]).square().mean()
    if next(calls) >= {PASSES}:
        found.item()
    return found

def task(hp):
    examples = TensorDataset(torch.zeros(1000, {WIDTH}), torch.zeros(1000, {WIDTH}))
    return Task(model=torch.nn.Linear({WIDTH}, {WIDTH}), train=examples, loss=loss)
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("brought")
    archive = packed(file("brought.py", SOURCE.encode()))
    (directory / "code.tar.gz").write_bytes(archive)
    document = run_spec(
        batch={"global": CHIPS * BATCH * PASSES, "perReplica": BATCH, "accumulation": PASSES},
        parameters={},
        code=code_of(archive, str(directory / "code.tar.gz")),
    )
    document["entrypoint"] = "brought:task"
    (directory / "run.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "tpu_trainer", "compile-check", "--run-spec", str(directory / "run.json")]
    env = {**os.environ, **Launcher(directory).base(), "PYTHONPATH": str(ROOT)}
    written = directory / "answer.json"
    done = subprocess.run(
        [*command, "--output", str(written)], env=env, cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(written.read_bytes())
    return found


def test_the_code_of_the_job_is_compiled(answer: dict[str, Any]) -> None:
    assert answer["fits"]
    assert answer["parameters"] == WIDTH * WIDTH + WIDTH


def test_a_step_counts_every_pass_and_exchanges_once(answer: dict[str, Any]) -> None:
    # Forward, and backward for the weights.
    assert answer["step"]["modelFlops"] == PASSES * 2 * (2 * BATCH * WIDTH * WIDTH)
    assert [one["kind"] for one in answer["step"]["collectives"]] == ["all-reduce"]
    assert answer["batch"]["accumulation"] == PASSES


def test_what_is_read_in_some_steps_only_is_found_in_its_line(answer: dict[str, Any]) -> None:
    """torch_xla crashes there, so that the step is traced again."""
    (found,) = answer["found"]
    line = SOURCE.splitlines().index("        found.item()") + 1
    assert (found["kind"], found["where"]) == ("HostRead", f"brought.py:{line}")
