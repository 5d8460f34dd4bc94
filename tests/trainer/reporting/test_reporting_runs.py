"""Real workers and a real progress service: what it hears of a run, and that a run never needs it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.processes import wait_until
from tests.trainer import quick_heartbeat
from tests.trainer.gang_processes import DEADLINE, TWO_PER_HOST, Gang, Launcher, run_spec
from tests.trainer.gated import Gates
from tests.trainer.progress_service import KUBEFLOW_PATH, PATH, Answer, ProgressService, Request, progress_service
from tpu_contract.protocol import WORKER_PHASES, ExitCode

STEPS = 24
MIDDLE = 14
"""The gate of step 14: 13 steps are done, so that a report of the loop's (every 10 steps) has been made."""

AFTER_A_CHECKPOINT = 7
"""The gate of step 7: 6 steps are done, and a checkpoint of step 5 has been taken."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ProgressService]:
    directory = tmp_path / "mounted"
    directory.mkdir()
    with progress_service(directory) as service:
        yield service


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Callable[..., Gates]]:
    made: list[Gates] = []

    def make(*places: int | str) -> Gates:
        made.append(Gates(tmp_path / "gates", *places))
        return made[-1]

    yield make
    for each in made:
        each.close()


def start(
    launcher: Launcher, service: ProgressService, gates: Gates, patience: dict[str, str] | None = None, **changes: Any
) -> Gang:
    spec = run_spec(**{"entrypoint": "tests.trainer.gated:task", "replicas": 1, "trainSteps": STEPS, **changes})
    environment = gates.environment | service.environment | (patience or {})
    return launcher.start(spec, module="tests.trainer.quick_heartbeat", **environment)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that reports to nobody."""
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"))
    try:
        gates = Gates(tmp_path_factory.mktemp("gates") / "none")
        spec = run_spec(entrypoint="tests.trainer.gated:task", replicas=1, trainSteps=STEPS)
        gang = launcher.start(spec, **gates.environment)
        assert gang.wait() == [ExitCode.Succeeded], gang.output()
        return gang.losses()
    finally:
        launcher.reap()


def ends_well(gang: Gang, undisturbed: list[float]) -> None:
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    assert gang.losses() == undisturbed


# What is reported.


def test_a_run_is_reported_from_its_start_to_its_end(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates], tmp_path: Path, undisturbed: list[float]
) -> None:
    gate = gates(1, AFTER_A_CHECKPOINT, MIDDLE, "evaluation")
    checkpoint = {"uri": str(tmp_path / "checkpoints"), "everySteps": 5, "keep": 2}
    gang = start(launcher, service, gate, checkpoint=checkpoint)

    first = service.wait_for(lambda said: True)
    assert "imports" in first.pop("startSeconds")
    assert first == {
        "phase": "Starting",
        "step": 0,
        "totalSteps": STEPS,
        "startStep": None,
        "loss": None,
        "examplesPerSecond": None,
        "checkpointStep": None,
        "bestCheckpoint": None,
        "estimatedRemainingSeconds": None,
        "program": None,
        "stacks": None,
        "metrics": {},
        "warnings": [],
    }
    gate.open(1)
    # It is committed beside the steps.
    wait_until(lambda: any(tmp_path.glob("checkpoints/step-00000005-*/COMMIT")), timeout=DEADLINE, what="a checkpoint")
    gate.open(AFTER_A_CHECKPOINT)
    middle = service.wait_for(lambda said: said["step"] == MIDDLE - 1)
    assert (middle["phase"], middle["loss"], middle["checkpointStep"]) == ("Training", undisturbed[9], 5)
    assert middle["startStep"] == 0
    assert middle["startSeconds"].keys() == {*WORKER_PHASES}
    assert min(middle["startSeconds"].values()) >= 0
    assert middle["examplesPerSecond"] > 0
    assert middle["estimatedRemainingSeconds"] >= 0
    gate.open(MIDDLE)
    service.wait_for(lambda said: (said["phase"], said["step"]) == ("Evaluating", STEPS))
    gate.open("evaluation")
    ends_well(gang, undisturbed)

    done = service.requests[-1].said
    assert {name: done[name] for name in ("phase", "step", "loss", "checkpointStep", "estimatedRemainingSeconds")} == {
        "phase": "Done",
        "step": STEPS,
        "loss": undisturbed[-1],
        "checkpointStep": STEPS,
        "estimatedRemainingSeconds": 0,
    }
    assert done["metrics"].keys() == {"accuracy"}
    steps = [request.said["step"] for request in service.requests]
    assert steps == sorted(steps)
    assert {(request.path, request.token) for request in service.requests} == {(PATH, "first-token")}
    assert "progress reports" not in gang.output()


def test_a_warning_stays_in_every_later_report(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    gate = gates(2, MIDDLE)
    gang = start(launcher, service, gate, checkpoint={"uri": str(checkpoints), "everySteps": 5, "keep": 2})
    gang.hosts[0].wait_for("attempt 1")
    service.wait_for(lambda said: said["step"] == 1)
    # A file where a directory should be: nothing can be written there.
    checkpoints.rename(checkpoints.with_name("gone"))
    checkpoints.write_text("")
    gate.open(2)
    warnings = service.wait_for(lambda said: said["step"] == MIDDLE - 1 and said["warnings"])["warnings"]
    assert "checkpoint of step 5 was not" in warnings[0]
    gate.open(MIDDLE)
    assert gang.wait() == [ExitCode.StorageFailed]
    assert service.requests[-1].said["warnings"][0] == warnings[0]


def test_while_a_step_stands_still_reports_continue_with_the_newest_token_and_stacks_on_demand(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates], undisturbed: list[float]
) -> None:
    gate = gates(MIDDLE)
    told = threading.Event()

    def answer(request: Request) -> Answer:
        if request.said["stacks"]:
            told.set()
        wanted = request.said["step"] == MIDDLE - 1 and request.token == "second-token" and not told.is_set()
        return Answer(body=b'{"stacks": true}' if wanted else b'{"stacks": false}')

    service.answer = answer
    gang = start(launcher, service, gate)
    service.wait_for(lambda said: said["step"] == MIDDLE - 1)
    service.wait_for_more(5)
    assert {request.said["step"] for request in service.requests[-3:]} == {MIDDLE - 1}

    replaced = service.token_file.with_suffix(".new")
    replaced.write_text("second-token")
    replaced.rename(service.token_file)
    stacks = service.wait_for(lambda said: said["stacks"])["stacks"]
    assert "tests/trainer/gated.py" in stacks
    assert "in _wait" in stacks
    gang.hosts[0].wait_for("the operator asks where this worker is")
    service.wait_for_more(2)
    assert [request.said["stacks"] is not None for request in service.requests].count(True) == 1
    assert service.requests[-1].token == "second-token"

    gate.open(MIDDLE)
    ends_well(gang, undisturbed)
    assert "in _wait" in gang.output()
    assert len({request.client for request in service.requests}) == 1, "the connection is kept"


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": 2, "replicas": 2},
        {"replicas": 2, "torch": TWO_PER_HOST},
    ],
    ids=["two hosts", "two processes"],
)
def test_one_replica_of_the_gang_reports(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates], changes: dict[str, Any]
) -> None:
    gang = start(launcher, service, gates(), **changes)
    assert set(gang.wait()) == {ExitCode.Succeeded}, gang.output()
    assert [request.said["phase"] for request in service.requests].count("Done") == 1
    assert len({request.client for request in service.requests}) == 1


def test_a_failure_is_told_by_the_termination_message_and_not_by_a_report(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates]
) -> None:
    gate = gates(MIDDLE)
    gang = start(launcher, service, gate, entrypoint="tests.trainer.gated:failing_at_14")
    service.wait_for(lambda said: said["step"] == MIDDLE - 1)
    gate.open(MIDDLE)
    assert gang.wait() == [ExitCode.UserError], gang.output()
    assert {request.said["phase"] for request in service.requests} <= {"Starting", "Training"}


def test_a_run_that_is_stopped_reports_its_last_checkpoint(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates], tmp_path: Path
) -> None:
    checkpoint = {"uri": str(tmp_path / "checkpoints"), "everySteps": 10_000_000, "keep": 2}
    gang = start(launcher, service, gates(), checkpoint=checkpoint, trainSteps=10_000_000)
    gang.hosts[0].wait_for("step 10/")
    gang.hosts[0].process.send_signal(signal.SIGTERM)
    assert gang.wait() == [ExitCode.Preempted], gang.output()
    last = service.requests[-1].said
    assert last["step"] == last["checkpointStep"] == gang.hosts[0].message()["step"]
    assert last["phase"] == "Training"


def test_kubeflow_trainer_gets_its_own_payload(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates], undisturbed: list[float]
) -> None:
    gate = gates(MIDDLE)
    spec = run_spec(entrypoint="tests.trainer.gated:task", replicas=1, trainSteps=STEPS)
    environment = gate.environment | service.kubeflow_environment
    gang = launcher.start(spec, module="tests.trainer.quick_heartbeat", **environment)
    service.wait_for(lambda said: said["trainerStatus"]["progressPercentage"] == 100 * (MIDDLE - 1) // STEPS)
    gate.open(MIDDLE)
    ends_well(gang, undisturbed)
    done = service.requests[-1].said["trainerStatus"]
    assert done["progressPercentage"] == 100
    assert {"name": "loss", "value": f"{undisturbed[-1]:.6g}"} in done["metrics"]
    assert {(request.path, request.token) for request in service.requests} == {(KUBEFLOW_PATH, "first-token")}


# Whatever happens to the service, the run is the same; each kind of trouble is in test_reporting.


def test_a_service_that_was_never_there_is_one_line_in_the_log(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates], undisturbed: list[float]
) -> None:
    service.stop()
    gate = gates(MIDDLE)
    gang = start(launcher, service, gate)
    gang.hosts[0].wait_for("ConnectionRefusedError")
    gate.open(MIDDLE)
    ends_well(gang, undisturbed)
    assert gang.output().count("progress reports: ") == 1


def test_a_report_that_never_gets_an_answer_does_not_keep_a_run_from_its_end(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates], undisturbed: list[float]
) -> None:
    def hangs(request: Request) -> Answer:
        threading.Event().wait(DEADLINE)
        return Answer()

    service.answer = hangs
    gang = start(launcher, service, gates(), {quick_heartbeat.LAST: "0.1"})
    ends_well(gang, undisturbed)
    assert "progress reports: " not in gang.output()


def test_a_service_that_comes_back_with_another_certificate_gets_reports_again(
    launcher: Launcher, service: ProgressService, gates: Callable[..., Gates], undisturbed: list[float]
) -> None:
    gate = gates(MIDDLE)
    gang = start(launcher, service, gate)
    service.wait_for(lambda said: said["step"] == MIDDLE - 1)
    service.stop()
    gang.hosts[0].wait_for("not delivered")
    service.start()
    gang.hosts[0].wait_for("delivered again, after")
    gate.open(MIDDLE)
    ends_well(gang, undisturbed)
    assert service.requests[-1].said["phase"] == "Done"
