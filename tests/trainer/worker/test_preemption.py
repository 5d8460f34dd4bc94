"""Told to stop at the awkward moments: at the start, while compiling, while a checkpoint is written, and twice."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import interrupted
from tests.trainer.gang_processes import Gang, Launcher, run_spec
from tests.trainer.gated import Gates
from tests.trainer.worker.test_interrupted import committed
from tpu_contract.protocol import ExitCode

LONG = 10_000_000


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def start(launcher: Launcher, checkpoints: Path, fault: str = "", **changes: Any) -> Gang:
    every = changes.pop("everySteps", LONG)
    spec = run_spec(
        entrypoint="tests.trainer.interrupted:task",
        checkpoint={"uri": str(checkpoints), "everySteps": every, "keep": 2},
        **{"hosts": 1, "replicas": 2, "trainSteps": LONG, **changes},
    )
    return launcher.start(spec, **({interrupted.FAULT: fault} if fault else {}))


def test_a_stop_while_the_task_is_built_ends_all_hosts_before_the_first_step(
    launcher: Launcher, checkpoints: Path
) -> None:
    gang = start(launcher, checkpoints, "1:0:TERM", hosts=2)
    assert gang.wait() == [ExitCode.Preempted] * 2, gang.output()
    assert "before the first step" in gang.hosts[0].message()["message"]
    assert committed(checkpoints) == 0


@pytest.mark.parametrize("replicas", [{"hosts": 1, "replicas": 1}, {"hosts": 2, "replicas": 2}], ids=["alone", "gang"])
def test_a_stop_while_the_first_step_compiles_ends_the_run_with_a_checkpoint_of_its_first_steps(
    launcher: Launcher, checkpoints: Path, replicas: dict[str, int]
) -> None:
    gang = start(launcher, checkpoints, "0:1:TERM", backend="xla", **replicas)
    assert set(gang.wait()) == {ExitCode.Preempted}, gang.output()
    step = gang.hosts[0].message()["step"]
    assert committed(checkpoints) == step <= 3


@pytest.mark.parametrize("replicas", [{"hosts": 1, "replicas": 1}, {"hosts": 2, "replicas": 2}], ids=["alone", "gang"])
def test_the_step_in_which_a_host_is_told_to_stop_is_the_program_of_all_steps(
    launcher: Launcher, checkpoints: Path, replicas: dict[str, int]
) -> None:
    gang = start(launcher, checkpoints, "0:20:TERM", backend="xla", **replicas)
    assert set(gang.wait()) == {ExitCode.Preempted}, gang.output()
    assert "compiled a new program" not in gang.output()


def test_two_stops_while_a_checkpoint_is_written_leave_it_and_the_last_step_committed(
    launcher: Launcher, checkpoints: Path
) -> None:
    spec = run_spec(
        entrypoint="tests.trainer.interrupted:task",
        replicas=1,
        trainSteps=LONG,
        checkpoint={"uri": str(checkpoints), "everySteps": 5, "keep": 3},
    )
    gang = launcher.start(spec, module="tests.trainer.signalled_writer")
    assert gang.wait() == [ExitCode.Preempted], gang.output()
    kept = sorted(int(path.parent.name.split("-")[1]) for path in checkpoints.glob("step-*/COMMIT"))
    assert kept[0] == 5
    assert kept[-1] == gang.hosts[0].message()["step"] == committed(checkpoints)


def test_a_trained_model_that_cannot_be_written_is_a_failure(
    launcher: Launcher, checkpoints: Path, tmp_path: Path
) -> None:
    checkpoint = {"uri": str(checkpoints), "everySteps": LONG, "keep": 2}
    with closing(Gates(tmp_path / "gates", 20)) as gates:
        gang = launcher.start(
            run_spec(entrypoint="tests.trainer.gated:task", checkpoint=checkpoint), **gates.environment
        )
        gang.hosts[0].wait_for("step 10/")
        checkpoints.rename(checkpoints.with_name("gone"))
        checkpoints.write_text("a file where the directory was")
        gates.open(20)
        assert gang.wait() == [ExitCode.StorageFailed], gang.output()
    assert "all 24 steps are trained, but" in gang.hosts[0].message()["message"]


def test_without_storage_the_termination_message_says_that_nothing_was_written(
    launcher: Launcher, checkpoints: Path
) -> None:
    gang = start(launcher, checkpoints)
    gang.hosts[0].wait_for("step 10/")
    checkpoints.rename(checkpoints.with_name("gone"))
    checkpoints.write_text("a file where the directory was")
    gang.hosts[0].process.send_signal(signal.SIGTERM)
    assert gang.wait() == [ExitCode.Preempted], gang.output()
    assert "could not be written" in gang.hosts[0].message()["message"]
