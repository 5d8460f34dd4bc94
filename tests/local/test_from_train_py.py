"""The scripts of docs/from-train-py.md, before and after, by the page's own commands."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.trainer.fork_server import FRAMEWORKS
from tests.trainer.gang_processes import ON_XLAS_CPU, ROOT, Launcher

PAGE = (ROOT / "docs" / "from-train-py.md").read_text(encoding="utf-8")
COMMANDS = dict(re.findall(r"^(tpujob run examples/from_train_py/(\w+)/.*)$", PAGE, re.MULTILINE))
ACCURACY = {"plain": "accuracy", "huggingface": "accuracy", "lightning": "val_accuracy"}


@pytest.mark.parametrize("flavour", ACCURACY)
def test_the_job_that_a_script_has_become_learns_the_digits(flavour: str, launcher: Launcher, tmp_path: Path) -> None:
    (command,) = (command for command, name in COMMANDS.items() if name == flavour)
    arguments = json.dumps([*shlex.split(command)[1:], "--output-dir", str(tmp_path / "out")])
    env = {**ON_XLAS_CPU, "CUDA_VISIBLE_DEVICES": "", "TEST_ARGUMENTS": arguments}
    launcher.run_alone("tests.local.forked_job", FRAMEWORKS, **env)
    result = json.loads((tmp_path / "out" / "result.json").read_bytes())
    assert result["metrics"][ACCURACY[flavour]] > 0.8
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("flavour", ACCURACY)
def test_the_script_that_it_was_learns_them_too(flavour: str, launcher: Launcher, tmp_path: Path) -> None:
    script = ROOT / "examples" / "from_train_py" / flavour / "before.py"
    place = {"TEST_SCRIPT": str(script), "TEST_FOLDER": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    output = launcher.run_alone("tests.local.forked_script", FRAMEWORKS, **ON_XLAS_CPU, **place)
    accuracies = re.findall(r"accuracy\D+(0\.\d+)", output)
    assert float(accuracies[-1]) > 0.8, output
