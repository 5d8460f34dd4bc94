"""The path of a TPU host: one replica per chip under torch_xla.launch; `chip_replicas` stands in for the chips."""

from __future__ import annotations

import signal

import pytest

from tests.trainer import tasks
from tests.trainer.gang import Gang, Launcher, run_spec
from tests.trainer.reference import reference_losses
from tpu_trainer import bucket
from tpu_trainer.contract import ExitCode

# Without the first two, replicas that wait in a collective take the threads that the others need.
TWO_CHIPS = {
    "PJRT_CPU_ASYNC_CLIENT": "0",
    "XLA_THREAD_POOL_SIZE": "8",
    "CPU_NUM_DEVICES": "2",
}


def start_chips(launcher: Launcher, **changes: object) -> Gang:
    spec = run_spec(**{"backend": "xla", "hardware": "TPU", "replicas": 2, **changes})
    return launcher.start(spec, module="tests.trainer.chip_replicas", **TWO_CHIPS)


def test_two_chips_follow_plain_pytorch(launcher: Launcher) -> None:
    gang = start_chips(launcher, optimizer="adamw")
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    expected = reference_losses("adamw", steps=24, warmup=5, batch=16, seed=3)
    assert gang.losses() == pytest.approx(expected, abs=1e-5)
    assert gang.hosts[0].message()["step"] == 24


def test_sigterm_to_the_host_stops_its_chips_together(launcher: Launcher) -> None:
    gang = start_chips(launcher, trainSteps=10_000_000)
    gang.hosts[0].wait_for("step 10/")
    gang.hosts[0].process.send_signal(signal.SIGTERM)
    assert gang.wait() == [ExitCode.Preempted], gang.output()
    assert gang.hosts[0].message()["step"] == len(gang.losses())


def test_another_number_of_chips_than_the_run_spec_says_is_a_bad_spec(launcher: Launcher) -> None:
    gang = start_chips(launcher, replicas=4)
    assert gang.wait() == [ExitCode.BadSpec], gang.output()
    assert "the run spec says 4 replicas, PJRT sees 2" in gang.hosts[0].message()["message"]


def test_a_step_is_one_all_reduce_of_one_flat_bucket(launcher: Launcher) -> None:
    gang = launcher.start(
        run_spec(backend="xla", hardware="TPU", replicas=2), module="tests.trainer.chip_step", **TWO_CHIPS
    )
    assert gang.wait() == [0], gang.output()
    elements = sum(parameter.numel() for parameter in tasks.Network().parameters()) + bucket.SIGNALS
    reductions = [line for line in gang.hosts[0].output.splitlines() if " all-reduce(" in line]
    assert len(reductions) == 1, reductions
    assert f"f32[{elements}]" in reductions[0]
