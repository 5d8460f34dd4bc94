"""`compile-check` of code that the job brings along, with accumulated gradients: two programs make its step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.aot.test_step_on_a_chip import CHIPS, run_spec
from tests.trainer.gang_processes import ROOT, Launcher
from tests.trainer.worker.test_archive import file, packed
from tests.trainer.worker.test_code import code_of
from tpu_trainer.checks.compile import check
from tpu_trainer.gang.backends.feed import AHEAD

WIDTH, BATCH, PASSES = 8, 16, 3
SOURCE = f"""
import torch
from torch.utils.data import TensorDataset
from tpu_trainer import Task

def task(hp):
    examples = TensorDataset(torch.zeros(1000, {WIDTH}), torch.zeros(1000, {WIDTH}))
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
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


def test_a_batch_of_any_size_is_traced_with_a_few_examples(tmp_path: Path) -> None:
    """What the search for the largest batch does: the dataset has a thousand examples, as the recipe says, and the step
    needs 65 thousand."""
    (tmp_path / "brought.py").write_text(SOURCE)
    size = 1 << 14
    document = run_spec(batch={"global": CHIPS * size, "perReplica": size}, parameters={}, datasetSize=1000)
    document["entrypoint"] = "brought:task"
    env = {**os.environ, **Launcher(tmp_path).base(), "PYTHONPATH": f"{ROOT}:{tmp_path}", "PJRT_DEVICE": "CPU"}
    with mock.patch.dict("os.environ", env):
        traced = check._trace({"spec": document, "examples": 4, "parent": os.getpid()})
    assert "error" not in traced, traced["error"]
    assert traced["ahead"] == (AHEAD + 1) * size * 2 * WIDTH * 4
    assert f"tensor<{size}x{WIDTH}xf32>" in traced["program"]["stablehlo"]
