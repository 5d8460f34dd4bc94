"""The snippets of the pages, run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.trainer import whole_runs
from tests.trainer.gang_processes import ACCELERATE_ON_CPU
from tpu_contract.protocol import ExitCode
from tpu_trainer.checkpoint.snapshot import weight_files
from tpu_trainer.task.task import Hyperparameters, Task

DOCS = Path(__file__).parents[3] / "docs"
DATA = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))


def snippet(page: str, containing: str, **names: Any) -> dict[str, Any]:
    """What the one block of the page that contains the text defines, given `names`."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if containing in block)
    exec(block, names)
    return names


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("page", "containing", "written"),
    [("cli.md", "load_model(", "runs/digits-20260115-120000-4711"), ("checkpoints.md", "best =", "best")],
)
def test_weights_that_are_used_twice_are_loaded(
    page: str, containing: str, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, model = Tied(), Tied()
    monkeypatch.chdir(tmp_path)
    (tmp_path / written).mkdir(parents=True)
    for name, content in weight_files(trained, {}):
        (tmp_path / written / name).write_bytes(content)

    def load_model(model: nn.Module, path: str) -> Any:
        return safetensors.torch.load_model(model, f"{written}/{Path(path).name}")

    names = {"load_model": load_model} if page == "checkpoints.md" else {}
    snippet(page, containing, model=model, **names)
    assert torch.equal(model.out.weight, trained.embedding.weight)


def test_class_weights_come_to_the_device_of_the_batch() -> None:
    # A device that refuses tensors of another, as an accelerator does.
    loss = snippet("tasks.md", "# class weights", weights=torch.ones(3), cross_entropy=cross_entropy)["loss"]
    batch = [torch.zeros(2, 4, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")]
    total, weight = loss(nn.Linear(4, 3, device="meta"), batch)
    assert (total.device.type, weight.device.type) == ("meta", "meta")


def test_several_optimizers_become_one_that_checkpoints_keep(tmp_path: Path) -> None:
    optimizer = snippet("tasks.md", "class Together", torch=torch)["optimizer"]

    def task(hp: Hyperparameters, rank: int) -> Task:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        return Task(model, DATA, lambda model, batch: model(batch[0]).square().mean(), optimizer=optimizer)

    def run(steps: int, place: str) -> whole_runs.Ran:
        job = {"namespace": "default", "name": "small", "uid": "5f0c", "attempt": 1 if steps == 3 else 2}
        return whole_runs.run(task, trainSteps=steps, job=job, checkpoint={"uri": str(tmp_path / place), "keep": 1})

    whole, begun, continued = run(8, "whole"), run(3, "parts"), run(8, "parts")
    assert [ran.outcome.code for ran in (whole, begun, continued)] == [ExitCode.Succeeded] * 3
    assert begun.losses + continued.losses == whole.losses


class Two(torch.optim.SGD):
    """Keeps its state as two optimizers'."""

    def state_dict(self) -> dict[str, Any]:
        return {"first": super().state_dict(), "second": {}}


def test_one_that_no_checkpoint_can_keep_is_known_before_the_first_step(tmp_path: Path) -> None:
    def task(hp: Hyperparameters, rank: int) -> Task:
        loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
        return Task(nn.Linear(4, 1), DATA, loss, optimizer=lambda parameters, hp: Two(parameters, lr=0.1))

    outcome = whole_runs.run(task, trainSteps=4, checkpoint={"uri": str(tmp_path), "keep": 1}).outcome
    assert outcome.code is ExitCode.UserError
    assert not outcome.step
    assert "its state_dict() must have" in outcome.message


def test_the_settings_of_frameworks_on_a_cpu_are_those_that_these_tests_have() -> None:
    page = (DOCS / "command.md").read_text(encoding="utf-8")
    settings = re.findall(r'- \{name: (\w+), value: "(\w+)"\}', page.partition("## Accelerate")[2])
    assert dict(settings) == ACCELERATE_ON_CPU
