"""A map-style dataset that changes with the epoch: every example is read as of the epoch that it belongs to."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from tests.trainer import in_process
from tests.trainer.lightning.test_lightning_trainer import spec as lightning_spec
from tests.trainer.whole_runs import run
from tpu_trainer import Hooks, Task
from tpu_trainer.data.batch_source import open_data, read_batches
from tpu_trainer.data.order import Order, Position, Share
from tpu_trainer.task.task import Hyperparameters

SIZE, BATCH = 12, 4
EPOCH = SIZE // BATCH


class Curriculum(Dataset[Any]):
    """An example is the epoch in which it was read."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.epoch


class AtOnce(Curriculum):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [self[index] for index in indices]


def model() -> nn.Module:
    return nn.Linear(1, 1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(torch.zeros(1)).sum()


def read(dataset: Any, workers: int, steps: int, start: Position | None = None) -> list[int]:
    """The epoch of every step's examples."""
    task = Task(model(), dataset, loss, workers=workers)
    order = Order(BATCH, 3, Share(0, 1), start=start or Position())
    epochs = []
    for (_, seen), _ in islice(read_batches(task, open_data(task, order), 0), steps):
        assert len(set(seen.tolist())) == 1
        epochs.append(int(seen[0]))
    return epochs


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Curriculum, AtOnce])
def test_every_example_is_of_its_epoch_also_if_it_is_read_ahead(workers: int, kind: type[Curriculum]) -> None:
    assert read(kind(), workers, 3 * EPOCH) == [0] * EPOCH + [1] * EPOCH + [2] * EPOCH
    assert read(kind(), workers, EPOCH, Position(1, BATCH)) == [1] * (EPOCH - 1) + [2]


@pytest.mark.parametrize("wrap", [lambda data: Subset(data, range(SIZE)), lambda data: ConcatDataset([data, data])])
def test_it_is_found_in_torchs_own_wrappers(wrap: Any) -> None:
    dataset = wrap(Curriculum())
    steps = len(dataset) // BATCH
    assert read(dataset, 2, 2 * steps) == [0] * steps + [1] * steps


def test_a_dataset_without_it_is_handed_to_the_readers_as_it_is() -> None:
    class Plain(Curriculum):
        set_epoch = None  # type: ignore[assignment]

    assert read(Plain(), 0, EPOCH) == [-1] * EPOCH


class Setting(Hooks):
    """As plain loops do it, where nothing reads ahead."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def epoch_begins(self, epoch: int) -> None:
        self._dataset.epoch = epoch


def half(dataset: Any) -> Subset[Any]:
    return Subset(dataset, range(SIZE))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrap", [lambda dataset: dataset, half, lambda dataset: ConcatDataset([half(dataset)])])
def test_a_hook_that_sets_an_attribute_is_told_what_the_readers_need(workers: int, wrap: Any) -> None:
    class Plain(Curriculum):
        set_epoch = None  # type: ignore[assignment]

    def made(hp: Hyperparameters, rank: int) -> Task:
        dataset = Plain()
        return Task(model(), wrap(dataset), loss, workers=workers, hooks=Setting(dataset))

    batch = {"global": BATCH, "perReplica": BATCH}
    warnings = run(made, trainSteps=2 * EPOCH, batch=batch).warnings
    assert any("epoch" in text and "set_epoch(epoch)" in text for text in warnings)
    assert not run(lambda hp, rank: Task(model(), Curriculum(), loss), trainSteps=2 * EPOCH, batch=batch).warnings


@pytest.mark.parametrize("shared", [True, False])
def test_an_evaluation_that_would_see_the_train_datas_epochs_is_told_of(shared: bool) -> None:
    """What it saw would depend on what has been read ahead, and on a restart."""

    def made(hp: Hyperparameters, rank: int) -> Task:
        train = Curriculum()
        evaluation = half(train if shared else Curriculum())
        return Task(model(), half(train), loss, evaluation=evaluation, metrics=lambda model, batch: {"epoch": batch[1]})

    warnings = run(made, trainSteps=1, batch={"global": BATCH, "perReplica": BATCH}).warnings
    assert any("one dataset object" in text for text in warnings) == shared


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Curriculum", "curriculum"])
def test_under_both_loops_of_a_module_too(tmp_path: Path, name: str) -> None:
    """Ten steps are two and a half epochs; the loss shows the epoch."""
    losses = in_process.run(lightning_spec(name), tmp_path).losses
    assert losses == [0.0] * 4 + [1.0] * 4 + [2.0] * 2
