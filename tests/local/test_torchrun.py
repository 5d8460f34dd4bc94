"""torchrun itself as the command of a job: what its failure is reported as."""

import os
import sysconfig
from pathlib import Path

from tests.local.runs import Runs

FAILS = """
def prepare(row):
    return row["label"]

print("loads", flush=True)
prepare({})
"""


def test_the_cause_of_a_failure_is_the_scripts_own_error(runs: Runs, tmp_path: Path) -> None:
    worker = tmp_path / "job" / "worker.py"
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    own_loop = {"trainer.backend": "Torch", "trainer.command": ["torchrun", str(worker)]}
    run = runs.start(FAILS, own_loop, environ={"PATH": path})
    assert run.wait() != 0
    (line,) = [line for line in run.stdout.splitlines() if "failure:" in line]
    assert "UserError (exit code 1)" in line
    assert "KeyError: 'label' (worker.py:" in line
