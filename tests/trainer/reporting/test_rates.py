"""The rates that the optimizer really steps with, in whole runs of tasks as they are found in public code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer import tasks
from tests.trainer.gang_processes import run_spec
from tests.trainer.in_process import Run, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task

RATE = 0.3
USED: list[list[float]] = []


class Spy(torch.optim.AdamW):
    """Writes down the rate of every group in every step."""

    def step(self, closure: Any = None) -> Any:
        USED.append([group["lr"] for group in self.param_groups])
        return super().step(closure)


def layer_decay(hp: Hyperparameters) -> Task:
    """Twelve groups, as timm's param_groups_layer_decay makes them: the rate is left to the scheduler."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(11)], nn.Linear(8, tasks.CLASSES))

    def groups(parameters: Any, hp: Hyperparameters) -> Spy:
        made = [
            {"params": list(layer.parameters()), "lr_scale": 0.75 ** (11 - depth)} for depth, layer in enumerate(model)
        ]
        return Spy(made, lr=hp.learning_rate)

    return Task(model=model, train=tasks.examples(), loss=tasks.loss, optimizer=groups)


def two_groups(hp: Hyperparameters) -> Task:
    """The first has the multiple of the recipe's rate that the variable FIRST says."""
    model = tasks.Network()

    def groups(parameters: Any, hp: Hyperparameters) -> Spy:
        *others, head = parameters
        share = float(os.environ["FIRST"])
        return Spy([{"params": others, "lr": share * hp.learning_rate}, {"params": [head]}], lr=hp.learning_rate)

    return Task(model=model, train=tasks.examples(), loss=tasks.loss, optimizer=groups)


class Module(lightning.LightningModule):
    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.network, self.rate = tasks.Network(), learning_rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return tasks.loss(self.network, batch)

    def configure_optimizers(self) -> Any:
        return Spy(self.parameters(), lr=self.rate)

    def train_dataloader(self) -> Any:
        return DataLoader(tasks.examples(), batch_size=16)


class WarmUp(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = self.rate * min(1.0, (self.global_step + 1) / 10)


class Halving(Module):
    def on_train_epoch_end(self) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5


class OneCycle(Module):
    def configure_optimizers(self) -> Any:
        optimizer = Spy(self.parameters(), lr=self.rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.rate, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Unscaled(Module):
    def __init__(self, base: float = 0.1) -> None:
        super().__init__(base)


def trained(entrypoint: str, directory: Path, rate: float = RATE, **changes: Any) -> Run:
    USED.clear()
    optimizer = {"name": "adamw", "learningRate": str(rate)}
    made = run(
        run_spec(entrypoint=f"tests.trainer.reporting.test_rates:{entrypoint}", **changes) | {"optimizer": optimizer},
        directory,
    )
    assert made.outcome.code is ExitCode.Succeeded, made.outcome.message
    return made


def test_the_groups_of_a_layer_decay_keep_their_multiples_of_the_recipes_rate(tmp_path: Path) -> None:
    made = trained("layer_decay", tmp_path)
    scales = [0.75 ** (11 - depth) for depth in range(12)]
    assert USED[0] == pytest.approx([RATE / 5 * scale for scale in scales])
    assert USED[-1] == pytest.approx([RATE * scale for scale in scales])
    assert made.warnings == []


@pytest.mark.parametrize("first", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(
    ("batch", "rate", "ramp"), [(8, RATE / 2, [1.0, 1.0]), (32, 2 * RATE, [0.75, 1.0])], ids=["lower", "higher"]
)
def test_the_ramp_after_a_move_is_the_recipes_whatever_multiple_of_its_rate_the_groups_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: float, batch: int, rate: float, ramp: list[float]
) -> None:
    monkeypatch.setenv("FIRST", str(first))
    same: dict[str, Any] = {"warmupSteps": 0, "checkpoint": {"uri": str(tmp_path / "checkpoints"), "keep": 1}}
    trained("two_groups", tmp_path, trainSteps=12, **same)
    moved = {"trainSteps": 24 * 16 // batch, "batch": {"global": batch, "perReplica": batch // 8}}
    trained("two_groups", tmp_path, rate, **moved, **same)
    assert USED[:2] == [pytest.approx([rate * factor * first, rate * factor]) for factor in ramp]


def test_a_warm_up_made_by_hand_is_used(tmp_path: Path) -> None:
    made = trained("WarmUp", tmp_path)
    assert [rate for (rate,) in USED] == pytest.approx([RATE * min(1.0, (step + 1) / 10) for step in range(24)])
    (said,) = made.warnings
    assert said.startswith("step 1: the task's own code")
    assert "0.03" in said
    assert "0.3" in said


def test_a_tasks_scheduler_owns_the_rate_and_the_run_says_so(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    made = trained("OneCycle", tmp_path)
    assert (USED[0], max(USED)) == ([pytest.approx(RATE / 25)], [pytest.approx(RATE, rel=0.01)])
    assert [said.partition(";")[0] for said in made.warnings] == snapshot


def test_a_module_that_ignores_the_recipes_rate_gets_a_warning(tmp_path: Path) -> None:
    (said,) = trained("Unscaled", tmp_path).warnings
    assert said.startswith("the optimizer was built with")
    assert "0.1" in said
    assert "0.3" in said


@pytest.mark.parametrize("entrypoint", ["WarmUp", "Halving"])
def test_rates_set_by_hand_continue_after_a_resume(tmp_path: Path, entrypoint: str) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoint = {"uri": str(checkpoints), "everySteps": 6, "keep": 9}
    whole = trained(entrypoint, tmp_path, checkpoint=checkpoint)
    rates = list(USED)
    for step in (12, 18, 24):
        shutil.rmtree(next(checkpoints.glob(f"step-{step:08d}-*")))
    rest = trained(entrypoint, tmp_path, checkpoint=checkpoint)
    assert (rates[6:], whole.losses[6:]) == (USED, rest.losses)
    assert len(rest.warnings) == 1
