"""One batch is evaluated before the first step: what is wrong shows then, and of what is right nothing remains."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from tests.trainer import tasks
from tests.trainer.gang_processes import DEADLINE, run_spec
from tests.trainer.in_process import Run, run
from tests.trainer.in_threads import ThreadBackend, in_threads
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.data.order import Share
from tpu_trainer.loop.evaluate import try_evaluation

CALLS: list[str] = []
DRAWN: list[tuple[float, ...]] = []


def _small(metrics: Any) -> Task:
    return Task(
        model=tasks.Network(), train=tasks.examples(), loss=tasks.loss, evaluation=tasks.examples(), metrics=metrics
    )


def typo(hp: Hyperparameters) -> Task:
    return _small(lambda model, batch: {"accuracy": model(batch[0]).argmx(dim=1)})


def mean(hp: Hyperparameters) -> Task:
    return _small(lambda model, batch: {"accuracy": model(batch[0]).mean()})


def number(hp: Hyperparameters) -> Task:
    return _small(lambda model, batch: {"accuracy": float(model(batch[0]).mean())})


def imaginary(hp: Hyperparameters) -> Task:
    return _small(lambda model, batch: {"accuracy": model(batch[0]).mean(dim=1) * 1j})


def nameless(hp: Hyperparameters) -> Task:
    return _small(lambda model, batch: model(batch[0]).mean(dim=1))


def taken(hp: Hyperparameters) -> Task:
    return _small(lambda model, batch: {"step": model(batch[0]).mean(dim=1)})


class Module(lightning.LightningModule):
    """Batch norm, dropout, a metric that counts on, and host randomness in every kind of step."""

    def __init__(self, validated: str = "yes") -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(()))
        self.validated = validated == "yes"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def train_dataloader(self) -> Any:
        return DataLoader(tasks.examples(), batch_size=16)

    def val_dataloader(self) -> Any:
        return DataLoader(tasks.examples(), batch_size=16) if self.validated else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        noise = random.random() + np.random.random() + torch.rand(()).item()
        return nn.functional.cross_entropy(self.network(features + noise + self.seen), labels)

    def on_fit_start(self) -> None:
        CALLS.append("on_fit_start")

    def on_train_start(self) -> None:
        CALLS.append(f"on_train_start {self.trainer.sanity_checking} {sorted(self.trainer.callback_metrics)}")
        DRAWN.append((random.random(), np.random.random(), torch.rand(()).item()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            CALLS.append(f"sanity {self.trainer.validating} {self.training}")
        self.seen += random.random() + np.random.random() + torch.rand(()).item()
        self.mean.update(self.network(batch[0]))
        self.log("count", self.seen)

    def on_validation_epoch_end(self) -> None:
        self.log("mean_update_count", float(self.mean._update_count))


class Broken(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss_of_validation", self.netwrok(batch[0]).mean())


class UnusedListState(Module):
    """A metric for a test that is never run is nobody's concern."""

    def __init__(self) -> None:
        super().__init__()
        self.test_auroc = BinaryAUROC()


def started(entrypoint: str, directory: Path, **changes: Any) -> Run:
    CALLS.clear()
    return run(
        run_spec(entrypoint=f"tests.trainer.loop.test_rehearsal:{entrypoint}", trainSteps=12, **changes), directory
    )


@pytest.mark.parametrize(
    ("entrypoint", "complaint"),
    [
        ("typo", "no attribute 'argmx'"),
        ("imaginary", "numbers, got torch.complex64"),
        ("mean", "shape [16], got shape []"),
        ("number", "shape [16], got a float"),
        ("nameless", "name, in a dict; got tensor("),
        ("taken", 'the name "step" is taken'),
        ("Broken", "no attribute 'netwrok'"),
    ],
)
def test_a_broken_evaluation_shows_before_the_first_step(tmp_path: Path, entrypoint: str, complaint: str) -> None:
    ended = started(entrypoint, tmp_path)
    assert ended.outcome.code is ExitCode.UserError
    assert complaint in ended.outcome.message
    assert ended.losses == []


def test_a_metric_that_is_not_validated_needs_no_other_trainer(tmp_path: Path) -> None:
    ended = started("UnusedListState", tmp_path)
    assert ended.outcome.code is ExitCode.Succeeded
    assert ended.losses != []


def test_the_trial_batch_leaves_no_trace(tmp_path: Path) -> None:
    tried = started("Module", tmp_path)
    assert tried.outcome.code is ExitCode.Succeeded, tried.outcome.message
    assert CALLS == ["on_fit_start", "sanity False False", "on_train_start False []"]
    (evaluation,) = tried.evaluations
    # Five batches of 72 examples: the sixth was tried and forgotten.
    assert evaluation["mean_update_count"] == 5
    untried = started("Module", tmp_path, parameters={"validated": "no"})
    assert untried.outcome.code is ExitCode.Succeeded, untried.outcome.message
    assert tried.losses == untried.losses
    assert DRAWN[-2] == DRAWN[-1]


def test_a_resumed_run_has_no_trial_evaluation(tmp_path: Path) -> None:
    checkpoint = {"uri": str(tmp_path / "checkpoints"), "everySteps": 5, "keep": 9}
    first = started("Module", tmp_path, checkpoint=checkpoint)
    assert "sanity False False" in CALLS
    for folder in (tmp_path / "checkpoints").glob("step-00000012-*"):
        (folder / "COMMIT").unlink()
    second = started("Module", tmp_path, checkpoint=checkpoint)
    assert (second.outcome.code, CALLS[:2]) == (ExitCode.Succeeded, ["on_fit_start", "on_train_start False []"])
    assert second.losses[-2:] == first.losses[-2:]


@pytest.mark.parametrize(
    ("stated", "code", "said"),
    [
        (72, ExitCode.Succeeded, []),
        (
            720,
            ExitCode.UserError,
            "recipe.datasetSize is 720, but the task's train dataset has 72 examples: the 24 steps",
        ),
        (71, ExitCode.UserError, "are 5.333 epochs of it, not the 5.408"),
    ],
)
def test_a_stated_size_of_the_data_is_compared_with_the_data(
    tmp_path: Path, stated: int, code: ExitCode, said: Any
) -> None:
    ended = run(run_spec(datasetSize=stated), tmp_path)
    assert ended.outcome.code is code
    assert (said in ended.outcome.message) if said else ended.warnings == []


def hundred_and_one(hp: Hyperparameters) -> Task:
    data = TensorDataset(torch.zeros(101, 8), torch.zeros(101, dtype=torch.long))
    return Task(model=tasks.Network(), train=data, loss=tasks.loss)


def test_a_size_that_is_off_by_one_percent_is_reported_and_accepted(tmp_path: Path) -> None:
    ended = started("hundred_and_one", tmp_path, datasetSize=100)
    assert ended.outcome.code is ExitCode.Succeeded
    (said,) = ended.warnings
    assert said.startswith("recipe.datasetSize is 100,")
    assert "101 examples" in said


def test_a_replica_that_shares_the_generators_has_restored_them_before_another_goes_on() -> None:
    first_waits = threading.Event()

    def rehearse(backend: ThreadBackend) -> None:
        if backend.rank == 0:
            meet = backend.barrier
            backend.barrier = lambda: (first_waits.set(), meet())
        else:
            backend.sync = lambda: first_waits.wait(DEADLINE)
        try_evaluation(Task(model=nn.Linear(1, 1), train=[], loss=tasks.loss), 4, Share(backend.rank, 2), backend)
        if backend.rank == 0:
            torch.default_generator.manual_seed(5)
            first_waits.set()

    in_threads(2, rehearse)
    assert torch.default_generator.get_state().equal(torch.Generator().manual_seed(5).get_state())
