"""The scripts of docs/from-train-py.md, before and after, by the page's own commands."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cluster.deadlines import deadline
from tests.trainer.gang_processes import ON_XLAS_CPU

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-train-py.md").read_text(encoding="utf-8")
COMMANDS = dict(re.findall(r"^(tpujob run examples/from_train_py/(\w+)/.*)$", PAGE, re.MULTILINE))
ACCURACY = {"plain": "accuracy", "huggingface": "accuracy", "lightning": "val_accuracy"}
DEADLINE = 300.0
"""Seconds after which a test gives up; no result depends on how fast a training is."""


def ran(command: list[str], folder: Path, **environ: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environ,
        capture_output=True,
        text=True,
        timeout=deadline(DEADLINE),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("flavour", ACCURACY)
def test_the_job_that_a_script_has_become_learns_the_digits(flavour: str, tmp_path: Path) -> None:
    (command,) = (command for command, name in COMMANDS.items() if name == flavour)
    tpujob, *arguments = shlex.split(command)
    program = str(Path(sysconfig.get_path("scripts")) / tpujob)
    ran([program, *arguments, "--output-dir", str(tmp_path / "out")], ROOT, XLA_FLAGS=ON_XLAS_CPU["XLA_FLAGS"])
    result = json.loads((tmp_path / "out" / "result.json").read_bytes())
    assert result["metrics"][ACCURACY[flavour]] > 0.8
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("flavour", ACCURACY)
def test_the_script_that_it_was_learns_them_too(flavour: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / "from_train_py" / flavour / "before.py"
    # Transformers would train on torch_xla, which is installed here.
    output = ran([sys.executable, str(script)], tmp_path, USE_TORCH_XLA="0")
    accuracies = re.findall(r"accuracy\D+(0\.\d+)", output)
    assert float(accuracies[-1]) > 0.8, output
