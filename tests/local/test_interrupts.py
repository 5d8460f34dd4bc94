"""Ctrl-C and worse: the workers stop gracefully or at once, and are never left behind."""

import os
import signal

import pytest

from tests.local.runs import Run, Runs
from tests.unit.histories import document, losses_of

OBEDIENT = """
def stop(number, frame):
    tell("stopped", signal.Signals(number).name)
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
tell("ready")
wait_forever()
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("ready")
wait_forever()
"""
AN_HOUR = {"trainer.terminationGracePeriodSeconds": 3600}
A_SECOND = {"trainer.terminationGracePeriodSeconds": 1}

FIRST_WORDS = "stopping the workers; interrupt again to kill them"


def ready(run: Run, hosts: int) -> Run:
    for host in range(hosts):
        run.told("ready", host)
    return run


def assert_cancelled(run: Run) -> None:
    assert run.wait() == 130
    assert run.surviving_processes() == []
    assert run.result()["state"] == "Cancelled"
    assert "Cancelled after" in run.stdout
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_asks_every_worker_to_stop(runs: Runs, number: signal.Signals) -> None:
    run = ready(runs.start(OBEDIENT, AN_HOUR, hosts=4, is_real=True), hosts=4)
    run.interrupt(number)
    assert_cancelled(run)
    assert [run.told("stopped", host) for host in range(4)] == ["SIGTERM"] * 4


def test_a_cancelled_run_keeps_its_loss_curve_and_what_was_saved_as_it_stopped(runs: Runs) -> None:
    leaves = f"""
    history = pathlib.Path(os.environ["TPUJOB_REPORT_DIRECTORY"]) / "history.json"
    history.write_bytes({document({"losses": losses_of([0.5])})!r})
    pathlib.Path(os.environ["TPUJOB_TERMINATION_LOG"]).write_text('{{"outcome": "Preempted", "checkpointStep": 1}}')
    sys.exit"""
    run = ready(runs.start(OBEDIENT.replace("\n    sys.exit", leaves), AN_HOUR), hosts=1)
    run.interrupt()
    assert_cancelled(run)
    result = run.result()
    assert (result["attempts"], result["lossCurve"]) == (1, [{"step": 1, "loss": 0.5}])
    assert result["checkpointStep"] == 1
    assert "checkpoint step 1" in run.stdout


def test_a_worker_that_does_not_stop_is_killed_after_its_grace_period(runs: Runs) -> None:
    run = ready(runs.start(STUBBORN, A_SECOND, hosts=2), hosts=2)
    run.interrupt()
    assert_cancelled(run)


def test_a_second_interrupt_kills_at_once(runs: Runs) -> None:
    run = ready(runs.start(STUBBORN, AN_HOUR, hosts=2), hosts=2)
    run.interrupt()
    run.wait_for_output(FIRST_WORDS)
    assert len(run.surviving_processes()) == 2
    run.interrupt()
    assert_cancelled(run)


def test_a_failed_run_that_waits_for_its_workers_can_be_interrupted(runs: Runs) -> None:
    fail_on_host_0 = """
if HOST == 0:
    while not (HERE / "told.ready.1.1.json").exists(): time.sleep(0.01)
    sys.exit(1)
"""
    run = runs.start(fail_on_host_0 + STUBBORN, AN_HOUR, hosts=2)
    run.wait_for_output(": Failed, ")
    run.interrupt()
    run.wait_for_output(FIRST_WORDS)
    run.interrupt()
    assert_cancelled(run)


def test_a_run_that_waits_for_its_next_attempt_can_be_interrupted(runs: Runs) -> None:
    run = runs.start("sys.exit(75)", {"runPolicy.restart.backoff": {"initialSeconds": 3600, "maxSeconds": 3600}})
    run.wait_for_output(": Restarting, ")
    run.interrupt()
    assert_cancelled(run)


def test_a_killed_run_leaves_no_worker_behind(runs: Runs) -> None:
    run = ready(runs.start(STUBBORN, AN_HOUR, hosts=4), hosts=4)
    assert len(run.surviving_processes()) == 4
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    run.wait_until_nothing_survives()
