"""The example as a researcher runs it on a laptop: the real trainer, four hosts, real data."""

import math
import shutil
from pathlib import Path

import yaml

from tests.local.runs import Runs

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_digits_are_learned_on_four_hosts(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    body = yaml.safe_load((EXAMPLES / "digits.yaml").read_text(encoding="utf-8"))
    # Compiling torch's Python files again in every worker would take most of the time.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    run = runs.start_job(tmp_path, body, environ=bytecode)
    assert run.process.wait(timeout=300) == 0, run.stdout + run.stderr
    result = run.result()
    assert (result["state"], result["attempts"]) == ("Succeeded", 1)
    assert (result["resolved"]["hosts"], result["resolved"]["replicas"]) == (4, 16)
    assert result["metrics"]["accuracy"] >= 0.95
    assert [point["step"] for point in result["lossCurve"]] == list(range(1, 301))
    assert all(math.isfinite(point["loss"]) for point in result["lossCurve"])
    assert result["lossCurve"][-1]["loss"] < result["lossCurve"][0]["loss"] / 10
    assert result["examplesPerSecond"] > 0
