"""What only a process of its own can show: a kill by the kernel, an interpreter's end, or a device of torch_xla."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.checkpoint.runs import assert_same, author, latest, snapshot
from tests.trainer.gang_processes import DEADLINE, ROOT, Launcher
from tpu_trainer.storage import open_store

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a module of this folder with arguments; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(module: str, *arguments: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'trainer_image'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", f"tests.trainer.checkpoint.{module}", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("commits", [1, 33])
def test_a_writer_killed_in_the_middle_loses_nothing_it_had_committed(
    commits: int, start: Start, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "checkpoints"))
    process = start("killed_writer", store.uri)
    said = [int(process.stdout.readline()) for _ in range(commits)]
    process.kill()
    # It went on until the signal arrived.
    said += [int(line) for line in process.stdout.read().splitlines()]
    found = latest(store, author().fingerprint, lambda _: None)
    assert found.commit.step >= said[-1]
    assert_same(found.snapshot, snapshot(found.commit.step))


def test_storage_that_never_answers_does_not_keep_the_process_from_ending(start: Start) -> None:
    process = start("stuck_writer")
    assert process.wait(DEADLINE) == 0
    assert process.stdout.read() == "ends\n"


def test_a_model_on_an_xla_device_is_copied_in_one_transfer_and_continues_to_the_same_bits(
    launcher: Launcher,
) -> None:
    said = launcher.run_on_xla("tests.trainer.checkpoint.xla_states")
    assert json.loads(said.splitlines()[-1]) == {
        "cost": {"TransferFromDeviceTime": 1, "CompileTime": 0, "ExecuteTime": 0},
        "devices": ["cpu"],
        "types": ["torch.bfloat16", "torch.bool", "torch.float32", "torch.int64"],
        "equal": True,
        "unchanged": True,
        "continued": True,
        "shared": True,
        "stepDevices": ["cpu"],
    }
