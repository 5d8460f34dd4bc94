"""The doctor on real worker processes: every pitfall that can be seen without a TPU, provoked and found."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.trainer import doctor_tasks
from tests.trainer.gang_processes import TWO_PER_HOST, Gang, Launcher, run_spec
from tpu_contract.protocol import ENV_HANG_SECONDS, ExitCode


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    """One torch_xla process that does everything wrong, one thing after the other; by the real command."""
    launcher = Launcher(tmp_path_factory.mktemp("ill"))
    spec = run_spec(backend="xla", entrypoint="tests.trainer.doctor_tasks:every_pitfall", trainSteps=doctor_tasks.STEPS)
    gang = launcher.start(spec, real=True)
    try:
        assert gang.wait() == [ExitCode.Succeeded], gang.output()
        yield gang
    finally:
        launcher.reap()


def test_a_healthy_gang_gets_no_warning_whatever_its_evaluations_do(launcher: Launcher) -> None:
    gang = launcher.start(
        run_spec(
            backend="xla",
            hosts=2,
            entrypoint="tests.trainer.doctor_tasks:evaluation_reads",
            evaluateEverySteps=10,
            trainSteps=60,
        )
    )
    assert gang.wait() == [ExitCode.Succeeded] * 2, gang.output()
    assert gang.warnings() == {}


def test_recompilations_are_reported_with_step_and_cause(ill: Gang) -> None:
    shapes = f"step {doctor_tasks.OTHER_SHAPE} compiled a new program"
    # Where the task begins to read a value, which cuts its program in two.
    program = f"step {doctor_tasks.ITEM.start} compiled a new program"
    found = ill.warnings()["RecompilationAfterWarmUp"]
    (of_shapes,) = [message for message in found if message.startswith(shapes)]
    (of_program,) = [message for message in found if message.startswith(program)]
    assert "batch is [16, 15] float32; in" in of_shapes
    assert "the shapes of the first step" in of_program


def test_an_operation_on_the_cpu_is_named_with_how_often_it_runs(ill: Gang) -> None:
    (message,) = ill.warnings()["CpuFallback"]
    assert message.startswith("aten::_unique2 has no")
    assert "1.0 times" in message


def test_values_read_in_every_step_are_counted(ill: Gang) -> None:
    (message,) = ill.warnings()["HostSync"]
    assert message.startswith("1.0 values a step are read")


def test_a_program_that_is_cut_in_two_is_reported(ill: Gang) -> None:
    (message,) = ill.warnings()["MidStepExecution"]
    rate, rest = message.split(" ", 1)
    # torch_xla counts a program when its own thread sends it off, so one of the 40 may fall into a neighbour's window.
    assert rate in ("1.9", "2.0", "2.1")
    assert rest.startswith("programs a step are sent to")


def test_sizes_that_do_not_fill_their_tiles_are_named(ill: Gang) -> None:
    (message,) = ill.warnings()["Padding"]
    assert "[1001, 1001] is computed as" in message
    assert "1024" in message
    assert "2 examples per replica are" in message
    assert "8 rows" in message


def test_waiting_for_data_is_reported(ill: Gang) -> None:
    (message,) = ill.warnings()["InputBound"]
    assert "waiting for the next batch" in message


def test_warnings_reach_the_history(ill: Gang) -> None:
    recorded = {finding["check"]: finding["message"] for finding in ill.recorded().document["warnings"]}
    assert recorded == {check: messages[-1] for check, messages in ill.warnings().items()}


def test_hosts_that_would_run_other_programs_end_before_the_first_step(launcher: Launcher) -> None:
    gang = launcher.start(
        run_spec(backend="xla", hosts=2, entrypoint="tests.trainer.doctor_tasks:one_host_runs_another_program")
    )
    assert gang.wait() == [ExitCode.Diverged] * 2, gang.output()
    messages = {host.message()["message"] for host in gang.hosts}
    (message,) = messages
    assert message.startswith("in step 1 replica 1 would run")
    assert "replica 0" in message


def test_parameters_that_differ_in_one_bit_end_every_host_and_name_the_parameter(launcher: Launcher) -> None:
    gang = launcher.start(
        run_spec(hosts=2, entrypoint="tests.trainer.doctor_tasks:one_hosts_parameters_drift", trainSteps=200)
    )
    assert gang.wait() == [ExitCode.Diverged] * 2, gang.output()
    (message,) = {host.message()["message"] for host in gang.hosts}
    assert "replica 1 differ from those" in message
    assert "first in head.bias" in message


def test_a_slow_host_is_named_with_how_slow_it_is(launcher: Launcher) -> None:
    gang = launcher.start(
        run_spec(hosts=2, entrypoint="tests.trainer.doctor_tasks:one_host_is_slow", trainSteps=300, warmupSteps=5)
    )
    assert gang.wait() == [ExitCode.Succeeded] * 2, gang.output()
    (message,) = gang.warnings()["StragglerHost"]
    assert message.startswith("host 1 is slow: its own work")


@pytest.mark.parametrize(
    "changes",
    [{"replicas": 1}, {"replicas": 2, "torch": TWO_PER_HOST}],
    ids=["one process", "two processes"],
)
def test_a_process_that_hangs_in_native_code_leaves_its_stacks_when_told_to_stop(
    launcher: Launcher, changes: dict[str, Any]
) -> None:
    spec = run_spec(entrypoint="tests.trainer.doctor_tasks:native_code_blocks", **changes)
    (host,) = launcher.start(spec, module="tests.trainer.impatient_watchdog").hosts
    host.wait_for("blocks now")
    host.process.send_signal(signal.SIGTERM)
    host.wait_for("asked to stop, and still in phase host; the stacks of all threads:")
    host.wait_for('tests/trainer/doctor_tasks.py", line')
    assert host.process.poll() is None


def test_a_run_whose_data_never_arrives_ends_with_the_place_where_it_hangs(launcher: Launcher) -> None:
    spec = run_spec(entrypoint="tests.trainer.doctor_tasks:dataset_blocks")
    gang = launcher.start(spec, **{ENV_HANG_SECONDS: "1"})
    assert gang.wait() == [ExitCode.Hung], gang.output()
    last = gang.hosts[0].message()
    assert last["outcome"] == "Hung"
    assert "in phase input after step 6" in last["message"]
    assert "doctor_tasks.py" in last["message"]
    assert "threading.Event().wait()" in last["message"]
    assert "Thread 0x" in gang.hosts[0].output
