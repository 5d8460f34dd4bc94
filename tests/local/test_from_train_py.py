"""The scripts of docs/from-train-py.md, before and after, by the page's own commands."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests import forked_tpujob
from tests.cluster.deadlines import deadline
from tests.trainer import fork_server
from tests.trainer.gang_processes import ON_XLAS_CPU, Launcher

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-train-py.md").read_text(encoding="utf-8")
COMMANDS = dict(re.findall(r"^(tpujob run examples/from_train_py/(\w+)/.*)$", PAGE, re.MULTILINE))
ACCURACY = {"plain": "accuracy", "huggingface": "accuracy", "lightning": "val_accuracy"}
IMPORTS = (
    *(*fork_server.TORCH, "sklearn.datasets", "pytorch_lightning"),
    *("transformers.trainer", "transformers.models.vit.modeling_vit"),
)
DEADLINE = 300.0
"""Seconds after which a test gives up; no result depends on how fast a training is."""


@pytest.mark.parametrize("flavour", ACCURACY)
def test_the_job_that_a_script_has_become_learns_the_digits(flavour: str, tmp_path: Path) -> None:
    (command,) = (command for command, name in COMMANDS.items() if name == flavour)
    arguments = [*shlex.split(command)[1:], "--output-dir", str(tmp_path / "out")]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": ON_XLAS_CPU["XLA_FLAGS"]}
    tpujob = forked_tpujob.start(arguments, ROOT, env, {})
    with tpujob.stdout:
        said = tpujob.stdout.read()
    assert tpujob.wait(timeout=deadline(DEADLINE)) == 0, said
    result = json.loads((tmp_path / "out" / "result.json").read_bytes())
    assert result["metrics"][ACCURACY[flavour]] > 0.8
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("flavour", ACCURACY)
def test_the_script_that_it_was_learns_them_too(flavour: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / "from_train_py" / flavour / "before.py"
    # Transformers would train on torch_xla, which is installed here.
    env = {"TEST_SCRIPT": str(script), "TEST_FOLDER": str(tmp_path), "USE_TORCH_XLA": "0", "CUDA_VISIBLE_DEVICES": ""}
    launcher = Launcher(tmp_path)
    try:
        output = launcher.run_alone("tests.local.forked_script", IMPORTS, **env)
    finally:
        launcher.reap()
    accuracies = re.findall(r"accuracy\D+(0\.\d+)", output)
    assert float(accuracies[-1]) > 0.8, output
