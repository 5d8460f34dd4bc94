"""The entry check's pod: after its two steps it compiles the step for the job's slice, as the operator asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.aot.test_step_on_a_chip import run_spec
from tests.trainer.gang_processes import DEADLINE, Launcher


def test_the_pod_makes_its_steps_and_then_compiles_for_the_slice(tmp_path: Path) -> None:
    spec: dict[str, Any] = run_spec(batch={"global": 32, "perReplica": 8}, parameters={})
    spec["entrypoint"] = "tests.trainer.tasks:small"
    launcher = Launcher(tmp_path)
    try:
        gang = launcher.start(spec, "tests.aot.entry_check", TPUJOB_COMPILE_SECONDS=str(DEADLINE))
        assert gang.wait() == [0], gang.output()
    finally:
        launcher.reap()
    said = gang.hosts[0].message()
    assert (said["outcome"], said["step"]) == ("Succeeded", 2)
    assert "made 2 steps" in said["message"]
    compiled = said["compiled"]
    assert (compiled["fits"], compiled["batch"]["perReplica"]) == (True, 8)
    assert 0 < compiled["memory"]["needed"] < compiled["memory"]["limit"]
    assert compiled["step"]["exchanged"]["all-reduce"] > 0
