"""What only a process of its own can show: a kill by the kernel, a thread at its end, or a device of torch_xla."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer import fork_server
from tests.trainer.checkpoint.runs import assert_same, author, latest, snapshot
from tests.trainer.gang_processes import ROOT, Launcher
from tpu_trainer.storage import open_store


@pytest.mark.parametrize("commits", [1, 33])
def test_a_writer_killed_in_the_middle_loses_nothing_it_had_committed(
    commits: int, launcher: Launcher, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "checkpoints"))
    env = {**launcher.base(), "TEST_STORE": store.uri}
    process = fork_server.start(fork_server.TORCH, "tests.trainer.checkpoint.killed_writer", env, str(ROOT))
    with process.stdout as lines:
        said = [int(lines.readline()) for _ in range(commits)]
        process.kill()
        # It went on until the signal arrived.
        said += [int(line) for line in lines]
    process.wait()
    found = latest(store, author().fingerprint, lambda _: None)
    assert found.commit.step >= said[-1]
    assert_same(found.snapshot, snapshot(found.commit.step))


def test_storage_that_never_answers_does_not_keep_the_process_from_ending(launcher: Launcher) -> None:
    assert launcher.run_alone("tests.trainer.checkpoint.stuck_writer") == "ends\n"


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
