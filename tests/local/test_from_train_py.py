"""The scripts of docs/from-train-py.md, before and after, by the page's own commands."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.fork_server import FRAMEWORKS
from tests.trainer.gang_processes import FRAMEWORKS_ENV, ROOT, Launcher

PAGE = (ROOT / "docs" / "from-train-py.md").read_text(encoding="utf-8")
COMMANDS = dict(re.findall(r"^(tpujob run examples/from_train_py/(\w+)/.*)$", PAGE, re.MULTILINE))
ACCURACY = {"plain": "accuracy", "huggingface": "accuracy", "lightning": "val_accuracy"}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.reap()


@pytest.mark.parametrize("flavour", ACCURACY)
def test_the_job_that_a_script_has_become_learns_the_digits(flavour: str, launcher: Launcher, tmp_path: Path) -> None:
    (command,) = (command for command, name in COMMANDS.items() if name == flavour)
    arguments = json.dumps([*shlex.split(command)[1:], "--output-dir", str(tmp_path / "out")])
    env = {**FRAMEWORKS_ENV, "TEST_ARGUMENTS": arguments}
    launcher.run_alone("tests.local.forked_job", FRAMEWORKS, **env)
    result = json.loads((tmp_path / "out" / "result.json").read_bytes())
    assert result["metrics"][ACCURACY[flavour]] > 0.8
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("flavour", ACCURACY)
def test_the_script_that_it_was_learns_them_too(flavour: str, launcher: Launcher, tmp_path: Path) -> None:
    script = ROOT / "examples" / "from_train_py" / flavour / "before.py"
    env = {**FRAMEWORKS_ENV, "TEST_SCRIPT": str(script), "TEST_FOLDER": str(tmp_path)}
    output = launcher.run_alone("tests.local.forked_script", FRAMEWORKS, **env)
    accuracies = re.findall(r"accuracy\D+(0\.\d+)", output)
    assert float(accuracies[-1]) > 0.8, output
