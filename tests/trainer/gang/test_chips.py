"""The path of a TPU host: one replica per chip under torch_xla.launch; `chip_replicas` stands in for the chips."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.trainer import tasks
from tests.trainer.gang_processes import Launcher, chips, run_spec, start_replicas
from tpu_contract.protocol import ExitCode
from tpu_trainer.gang import exchange


def test_sigterm_to_the_real_command_stops_its_chips_together(launcher: Launcher) -> None:
    spec = run_spec(backend="xla", hardware="TPU", replicas=2, trainSteps=10_000_000)
    gang = launcher.start(spec, module="tests.trainer.chip_replicas", real=True, **chips(2))
    gang.hosts[0].wait_for(": loss ")
    gang.hosts[0].process.send_signal(signal.SIGTERM)
    assert gang.wait() == [ExitCode.Preempted], gang.output()
    assert gang.hosts[0].message()["step"] == len(gang.losses())


def test_a_number_of_chips_other_than_the_run_specs_is_a_bad_spec(launcher: Launcher, tmp_path: Path) -> None:
    spec = run_spec(backend="xla", hardware="TPU", replicas=4)
    (tmp_path / "tpu_driver.log.INFO.1").write_text("what libtpu had to say\n")
    gang = launcher.start(spec, module="tests.trainer.chip_replicas", TPU_LOG_DIR=str(tmp_path), **chips(2))
    assert gang.wait() == [ExitCode.BadSpec], gang.output()
    assert "the run spec says 4 replicas" in gang.hosts[0].message()["message"]
    # What opening real chips would depend on is said before it is tried.
    assert f"runs as user {os.geteuid()} of group {os.getegid()}; may lock memory" in gang.hosts[0].output
    # The next container on this node finds libtpu's log empty.
    *_, kept, last = gang.hosts[0].output.splitlines()
    assert (kept, last.partition(":")[0]) == ("what libtpu had to say", "BadSpec")


def test_a_small_models_step_is_one_all_reduce_of_its_gradients_in_reverse_order(launcher: Launcher) -> None:
    spec = run_spec(backend="xla", hardware="TPU", replicas=2)
    gang = launcher.start(spec, module="tests.trainer.chip_step", **chips(2))
    assert gang.wait() == [0], gang.output()
    reductions = [line for line in gang.hosts[0].output.splitlines() if " all-reduce(" in line]
    assert len(reductions) == 1, reductions
    results = re.findall(r"f32\[([0-9,]*)\]", reductions[0].split(" all-reduce(")[0])
    shapes = [parameter.shape for parameter in reversed(list(tasks.Network().parameters()))]
    # Last comes torch_xla's own token.
    assert results == [*(",".join(map(str, shape)) for shape in shapes), str(exchange.SIGNALS), ""]


def test_replicas_that_share_a_process_do_not_count_each_others_programs_and_reads(launcher: Launcher) -> None:
    gang = start_replicas(launcher, "chips", 2, trainSteps=120, entrypoint="tests.trainer.tasks:talkative")
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    assert gang.warnings() == {}
    # Nor does what the task logs cost a program or a read.
    metrics = gang.hosts[0].message()["metrics"]
    assert metrics["half"] == pytest.approx(metrics["loss"] / 2)
    assert metrics["calls"] == 120
