"""A ladder on this machine, rung by rung, each with its own hosts. The trainer is a stand-in that measures at once."""

from pathlib import Path
from typing import Any

from tests.contract.jobs import job_body
from tests.local.runs import Run, Runs
from tests.local.test_forks import stand_in

MEASURES = """
import json, os, pathlib
run = json.loads(pathlib.Path(os.environ["TPUJOB_RUN_SPEC"]).read_text())
replicas = run["slice"]["replicas"]
steps = min(run["trainSteps"], run.get("endAfterSteps", run["trainSteps"]))
rung = {"firstLoss": 2.0, "lastLoss": 1.0, "errorsFallen": 9.0, "recompilations": 0, "notFinite": 0}
message = {"outcome": "Succeeded", "message": f"trained {steps} steps", "step": steps, "metrics": {"loss": 1.0}}
message |= {"examplesPerSecond": 90.0 * replicas if replicas > 4 else 400.0}
if "endAfterSteps" in run:
    message["rung"] = rung | {"findings": {}}
pathlib.Path(os.environ["TPUJOB_TERMINATION_LOG"]).write_text(json.dumps(message))
"""


def ascends(runs: Runs, directory: Path, **gates: Any) -> Run:
    stand_in(directory, MEASURES)
    (directory / "task.py").write_text("def task(hp): pass\n")
    rungs = [
        {"slice": {"acceleratorType": "v5litepod-4"}, "steps": 20},
        {"slice": {"acceleratorType": "v5litepod-8"}, "steps": 30, "gates": gates},
    ]
    tuned = {"recipe.tunedOn": {"acceleratorType": "v5litepod-4"}, "recipe.globalBatchSize": 32}
    own = {"ladder.rungs": rungs, "trainer.backend": "Torch", "trainer.entrypoint": "task:task"}
    return runs.start_job(directory, job_body(tuned | own))


def test_three_rungs_pass(runs: Runs, tmp_path: Path) -> None:
    run = ascends(runs, tmp_path, minEfficiency="0.89")
    assert run.wait() == 0, run.stderr
    result = run.result()
    assert [(rung["slice"], rung["steps"], rung["verdict"]) for rung in result["rungs"]] == [
        ("v5litepod-4", 20, "Passed"),
        ("v5litepod-8", 30, "Passed"),
        ("v5litepod-16", 75, "Passed"),
    ]
    assert [rung.get("efficiency") for rung in result["rungs"]] == [None, "0.9", "1"]
    assert (result["attempts"], result["resolved"]["acceleratorType"]) == (3, "v5litepod-16")
    pods = sorted(path.name for path in (run.out / "pods").iterdir())
    assert pods == ["digits-1-0-0", "digits-2-0-0", "digits-2-0-1", *(f"digits-3-0-{host}" for host in range(4))]
