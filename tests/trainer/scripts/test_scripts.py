"""Training scripts as their authors write them, with the lines that docs/command.md and docs/tasks.md ask for."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.processes import wait_until
from tests.trainer.fork_server import FRAMEWORKS
from tests.trainer.gang_processes import DEADLINE, Gang, Launcher, run_spec
from tests.trainer.in_process import run

SCRIPTS = "tests.trainer.scripts"


def own_loop(**changes: Any) -> dict[str, Any]:
    """A run spec of a loop of the user's own on two hosts."""
    document = run_spec(**{"hosts": 2, **changes}) | {"optimizer": {"name": "sgd", "learningRate": "0.05"}}
    del document["entrypoint"]
    return document


def has_trained(gang: Gang) -> bool:
    return (gang.reports / "history.json").exists()


def step_of(gang: Gang) -> int:
    steps = {host.message()["step"] for host in gang.hosts}
    assert len(steps) == 1, gang.output()
    return steps.pop()


@pytest.mark.parametrize(
    ("name", "optimizer", "below"),
    [
        ("mnist", {"name": "adadelta", "learningRate": "0.5"}, 0.4),
        ("mixup", {"name": "sgd", "learningRate": "0.2", "momentum": "0.9", "weightDecay": "1e-4"}, 0.69),
        ("gpt", {"name": "adamw", "learningRate": "0.01", "weightDecay": "0.1"}, 1.0),
        ("word_lm", {"name": "adamw", "learningRate": "0.03"}, 1.0),
    ],
)
def test_a_well_known_script_learns_as_a_task(
    name: str, optimizer: dict[str, str], below: float, tmp_path: Path
) -> None:
    spec = run_spec(
        entrypoint=f"{SCRIPTS}.tasks:{name}", replicas=1, batch={"global": 32, "perReplica": 32}, trainSteps=60
    )
    finished = run(spec | {"optimizer": optimizer}, tmp_path)
    assert finished.outcome.code == 0, finished.outcome.message
    assert finished.losses[0] > 0.69
    assert sum(finished.losses[-5:]) / 5 < below


def test_the_own_loop_of_the_examples_stops_on_all_hosts_after_the_same_step_and_continues(
    launcher: Launcher, tmp_path: Path
) -> None:
    place = {"TPUJOB_CHECKPOINT_URI": str(tmp_path)}
    gang = launcher.start(own_loop(trainSteps=10**6), "examples.own_loop", packages=FRAMEWORKS, **place)
    gang.hosts[0].wait_for("step 100:")
    gang.hosts[1].process.send_signal(signal.SIGTERM)
    assert gang.wait() == [75, 75], gang.output()
    stopped = step_of(gang)
    assert gang.hosts[0].message()["checkpointStep"] == stopped
    gang = launcher.start(own_loop(trainSteps=stopped + 20), "examples.own_loop", packages=FRAMEWORKS, **place)
    assert gang.wait() == [0, 0], gang.output()
    assert step_of(gang) == stopped + 20
    assert len(gang.losses()) == 20
    assert gang.hosts[0].message()["metrics"]["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("script", "metric"), [("hf_causal_lm", "eval_loss"), ("lightning_trainer", "val_acc")], ids=["HF", "Lightning"]
)
def test_a_framework_with_the_callback_stops_and_continues_from_its_own_checkpoint(
    script: str, metric: str, launcher: Launcher, tmp_path: Path
) -> None:
    settings = {"SCRIPT_FOLDER": str(tmp_path), "MAX_STEPS": str(10**6)}
    gang = launcher.start(own_loop(), f"{SCRIPTS}.{script}", packages=FRAMEWORKS, **settings)
    wait_until(lambda: has_trained(gang), timeout=DEADLINE, what="a history")
    gang.hosts[1].process.send_signal(signal.SIGTERM)
    assert gang.wait() == [75, 75], gang.output()
    stopped = step_of(gang)
    settings["MAX_STEPS"] = str(stopped + 12)
    gang = launcher.start(own_loop(), f"{SCRIPTS}.{script}", packages=FRAMEWORKS, **settings)
    assert gang.wait() == [0, 0], gang.output()
    said = gang.hosts[0].message()
    assert (said["outcome"], step_of(gang)) == ("Succeeded", stopped + 12)
    assert metric in said["metrics"]
    assert gang.recorded().document["attempts"][-1]["first"] == stopped


def test_accelerates_loop_trains_as_one_gang(launcher: Launcher) -> None:
    gang = launcher.start(own_loop(), f"{SCRIPTS}.hf_accelerate", packages=FRAMEWORKS)
    assert gang.wait() == [0, 0], gang.output()
    assert "processes 2" in gang.output()
    assert step_of(gang) == 16
    assert gang.hosts[0].message()["metrics"]["accuracy"] > 0.6


def test_torch_xlas_own_loop_reports_on_one_host(launcher: Launcher) -> None:
    gang = launcher.start(own_loop(hosts=1, backend="xla"), f"{SCRIPTS}.xla_mnist", packages=FRAMEWORKS)
    assert gang.wait() == [0], gang.output()
    assert step_of(gang) == 24
    assert len(gang.losses()) == 24


def test_the_own_loop_on_chips_stops_when_the_process_that_launched_it_is_told_to_and_continues(
    launcher: Launcher, tmp_path: Path
) -> None:
    def start(steps: int, module: str) -> Gang:
        spec = own_loop(hosts=1, backend="xla", trainSteps=steps)
        place = {"TPUJOB_CHECKPOINT_URI": str(tmp_path)}
        return launcher.start(spec, module, ranked=False, packages=FRAMEWORKS, **place)

    # As in a pod: torch_xla.launch starts the processes of the chips, which import the example again.
    gang = start(10**6, "examples.own_loop_tpu")
    gang.hosts[0].wait_for("step 100:")
    gang.hosts[0].process.send_signal(signal.SIGTERM)
    assert gang.wait() == [75], gang.output()
    stopped = step_of(gang)
    assert gang.hosts[0].message()["checkpointStep"] == stopped
    gang = start(stopped + 20, f"{SCRIPTS}.forked_own_loop_tpu")
    assert gang.wait() == [0], gang.output()
    assert step_of(gang) == stopped + 20
    assert len(gang.losses()) == 20
