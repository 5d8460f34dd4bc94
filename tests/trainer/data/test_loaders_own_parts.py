"""What a user's loader brings besides its data: `worker_init_fn` is called, an iterator of its own is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from tests.trainer import lightning_zoo, whole_runs
from tests.trainer.gang_processes import Launcher, run_spec
from tests.trainer.in_process import run
from tests.trainer.lightning.test_lightning_trainer import spec
from tpu_contract.protocol import ExitCode
from tpu_trainer import LightningRun, Task
from tpu_trainer.task.task import Hyperparameters

pytestmark = pytest.mark.filterwarnings("ignore")


class Archive(Dataset[Any]):
    """Can be read only where `opens` was called, as a file that each worker opens for itself."""

    def __init__(self, size: int = 64) -> None:
        self.size, self.opened_by = size, -1

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        assert self.opened_by >= 0
        return torch.full((8,), float(index % 7)), torch.zeros(1)


class Shards:
    """The same as a stream in shards."""

    num_shards = 4
    opened_by = -1

    def shard(self, index: int, count: int) -> Any:
        assert self.opened_by >= 0
        return ((torch.full((8,), float(each)), torch.zeros(1)) for each in range(16))


def opens(number: int) -> None:
    """As torch's documentation has it: the dataset is in the worker's info."""
    info: Any = get_worker_info()
    info.dataset.opened_by = info.id
    assert number == info.id


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("train", [Archive, Shards])
def test_a_tasks_workers_begin_with_its_function(train: Any) -> None:
    """Also those that compare the processes' data, and those of evaluations."""

    def made(hp: Hyperparameters, rank: int) -> Task:
        return Task(
            nn.Linear(8, 1),
            train(),
            loss,
            workers=2,
            worker_init=opens,
            evaluation=Archive(11),
            evaluation_worker_init=opens,
            metrics=lambda model, batch: {"error": model(batch[0])[:, 0]},
        )

    outcome = whole_runs.run(made, 2, trainSteps=3).outcome
    assert outcome.code is ExitCode.Succeeded, outcome.message


@pytest.mark.parametrize(("how", "what"), [("packed", "a PackedSequence"), ("nested", "a nested tensor")])
def test_a_batch_that_xla_does_not_take_is_the_users_to_mend(how: str, what: str, launcher: Launcher) -> None:
    changes = {"entrypoint": "tests.trainer.collating_tasks:collated", "parameters": {"how": how}, "trainSteps": 3}
    gang = launcher.start(run_spec(replicas=1, batch={"global": 4, "perReplica": 4}, backend="xla", **changes))
    assert gang.wait() == [ExitCode.UserError], gang.output()
    assert gang.hosts[0].message()["message"].startswith(f"a batch holds {what}, ")


class OfLoaders(lightning_zoo.Plain):
    def train_dataloader(self) -> Any:
        return DataLoader(Archive(), batch_size=16, num_workers=1, worker_init_fn=opens)

    def val_dataloader(self) -> Any:
        return DataLoader(Archive(11), batch_size=4, num_workers=1, worker_init_fn=opens)


def own_loop(lr: float) -> OfLoaders:
    return OfLoaders(lr)


def lightnings(lr: float) -> LightningRun:
    return LightningRun(OfLoaders(lr))


@pytest.mark.parametrize("name", ["own_loop", "lightnings"])
def test_a_modules_workers_begin_with_its_loaders_function(name: str, tmp_path: Path) -> None:
    outcome = run(spec("Plain") | {"entrypoint": f"{__name__}:{name}"}, tmp_path).outcome
    assert outcome.code is ExitCode.Succeeded, outcome.message


class Mixing(DataLoader[Any]):
    def __iter__(self) -> Any:
        for features, target in super().__iter__():
            yield features.flip(0) + features, target


class Picking(DataLoader[Any]):
    """Plugs in below `__iter__`, as libraries for graphs do."""

    def _get_iterator(self) -> Any:
        return iter([next(super()._get_iterator())])


class Plain(DataLoader[Any]):
    """Only has arguments of its own."""

    def __init__(self, data: Any, **options: Any) -> None:
        super().__init__(data, shuffle=True, **options)


DATA = TensorDataset(torch.zeros(64, 8), torch.zeros(64, 1))


class WithLoader(lightning_zoo.Plain):
    def __init__(self, lr: float, loader: str, validates: bool) -> None:
        super().__init__(lr)
        self.made, self.validates = {"Mixing": Mixing, "Picking": Picking, "Plain": Plain}[loader], validates

    def train_dataloader(self) -> Any:
        return (DataLoader if self.validates else self.made)(DATA, batch_size=16)

    def val_dataloader(self) -> Any:
        return (self.made if self.validates else DataLoader)(DATA, batch_size=16)


def loads(lr: float, loader: str, validates: bool, own: bool) -> Any:
    module = WithLoader(lr, loader, validates)
    return module if own else LightningRun(module)


@pytest.mark.parametrize("own", ["true", "false"])
@pytest.mark.parametrize(("loader", "validates"), [("Mixing", "false"), ("Mixing", "true"), ("Picking", "false")])
def test_a_loader_that_makes_its_batches_itself_is_refused(
    loader: str, validates: str, own: str, tmp_path: Path
) -> None:
    parameters = {"loader": loader, "validates": validates, "own": own}
    outcome = run(spec("Plain", parameters=parameters) | {"entrypoint": f"{__name__}:loads"}, tmp_path).outcome
    assert outcome.code is ExitCode.UserError
    assert not outcome.step
    name = "val_dataloader" if validates == "true" else "train_dataloader"
    assert outcome.message.startswith(f"{name}: {loader} has its own ")


@pytest.mark.parametrize("own", ["true", "false"])
def test_a_loader_with_arguments_of_its_own_is_not(own: str, tmp_path: Path) -> None:
    parameters = {"loader": "Plain", "validates": "false", "own": own}
    outcome = run(spec("Plain", parameters=parameters) | {"entrypoint": f"{__name__}:loads"}, tmp_path).outcome
    assert outcome.code is ExitCode.Succeeded, outcome.message
