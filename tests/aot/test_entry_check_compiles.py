"""The entry check's pod: after its two steps it compiles the step for the job's slice, as the operator asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.aot.test_step_on_a_chip import run_spec
from tests.trainer.gang_processes import DEADLINE, ON_XLAS_CPU, ROOT


def test_the_pod_makes_its_steps_and_then_compiles_for_the_slice(tmp_path: Path) -> None:
    document: dict[str, Any] = run_spec(batch={"global": 32, "perReplica": 8}, parameters={})
    document["entrypoint"] = "tests.trainer.tasks:small"
    (tmp_path / "run.json").write_text(json.dumps(document))
    words = tmp_path / "words"
    env = {
        **os.environ,
        **ON_XLAS_CPU,
        "PYTHONPATH": str(ROOT),
        "TPUJOB_RUN_SPEC": str(tmp_path / "run.json"),
        "TPUJOB_COMPILE_SECONDS": str(DEADLINE),
        "TPUJOB_TERMINATION_LOG": str(words),
    }
    command = [sys.executable, "-m", "tpu_trainer", "entry-check"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(words.read_text())
    assert (said["outcome"], said["step"]) == ("Succeeded", 2)
    assert "made 2 steps" in said["message"]
    compiled = said["compiled"]
    assert (compiled["fits"], compiled["batch"]["perReplica"]) == (True, 8)
    assert 0 < compiled["memory"]["needed"] < compiled["memory"]["limit"]
    assert compiled["step"]["exchanged"]["all-reduce"] > 0
