"""What a LightningModule must not want of the trainer's own loop, each named, and what it is told of its trainer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.trainer.task.test_task import hyperparameters
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.loading import Share, epoch_order
from tpu_trainer.lightning import NeedsTrainerError, adopt, is_lightning
from tpu_trainer.lightning.optimizers import read_configuration
from tpu_trainer.task.board import ReportLogger

DATA = TensorDataset(torch.arange(40.0)[:, None])


class Plain(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=2)


def adopted(kind: type[nn.Module], data: Any = None, world: int = 1, **spec: Any) -> Any:
    return adopt(kind(), data, hyperparameters(**spec), Share(0, world))


class Manual(Plain):
    automatic_optimization = False


class OwnBackward(Plain):
    def backward(self, loss: Tensor) -> None: ...


class Callbacks(Plain):
    def configure_callbacks(self) -> Any: ...


class NoData(lightning.LightningModule):
    training_step, configure_optimizers = Plain.training_step, Plain.configure_optimizers


class NoStep(lightning.LightningModule):
    def configure_optimizers(self) -> Any: ...


class TwoLoaders(Plain):
    def train_dataloader(self) -> Any:
        return [DataLoader(DATA), DataLoader(DATA)]


class SeveralInputs(Plain):
    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any: ...


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


class IterableValidation(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def val_dataloader(self) -> Any:
        return DataLoader(Endless())


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (NoData, "neither the LightningModule"),
        (NoStep, "NoStep has no training_step()"),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused_at_once(kind: type[nn.Module], complaint: str) -> None:
    with pytest.raises(UserCodeError) as refusal:
        adopted(kind)
    assert complaint in str(refusal.value)
    assert not isinstance(refusal.value, NeedsTrainerError)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Manual, "automatic_optimization is"),
        (OwnBackward, "OwnBackward overrides"),
        (Callbacks, "configure_callbacks()"),
        (TwoLoaders, "torch.utils.data.DataLoader"),
        (SeveralInputs, "training_step takes (batch"),
        (IterableValidation, "val_dataloader: its dataset"),
    ],
)
def test_a_module_that_needs_lightnings_trainer_is_known_at_once(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(NeedsTrainerError) as caught:
        adopted(kind)
    assert reason in str(caught.value)


def test_a_pair_without_a_data_module_is_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UserCodeError) as caught:
        adopted(Plain, DataLoader(DATA))
    assert str(caught.value) == snapshot


OWN_BATCHES = BatchSampler(SequentialSampler(DATA), 2, drop_last=True)


class Buckets(BatchSampler): ...


class Endlessly(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class OwnOrder(RandomSampler):
    """A random sampler that is not torch's."""

    def __iter__(self) -> Iterator[int]:
        return reversed(range(40))


def weighted(count: int, **own: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler([0.0] * 20 + [1.0] * 20, count, **own)


@pytest.mark.parametrize(
    ("sampler", "length"),
    [
        (weighted(60), 60),
        (weighted(60, generator=torch.Generator()), 60),
        (RandomSampler(DATA, replacement=True), 40),
        (RandomSampler(DATA, num_samples=12), 12),
        (OwnOrder(DATA), 40),
    ],
)
def test_any_other_sampler_is_the_order_of_an_epoch_again_and_again(sampler: Any, length: int) -> None:
    kind = type("Kind", (Plain,), {"train_dataloader": lambda self: DataLoader(DATA, sampler=sampler, batch_size=4)})
    order = adopted(kind)[0].order
    first, second, again = (epoch_order(40, 3, epoch, order).tolist() for epoch in (0, 1, 0))
    assert len(first) == length
    assert first == again
    assert set(first) <= (set(range(20, 40)) if type(sampler) is WeightedRandomSampler else set(range(40)))
    assert (first == second) == (type(sampler) is OwnOrder)


def test_a_sampler_of_held_out_data_needs_lightnings_trainer(snapshot: SnapshotAssertion) -> None:
    loader = DataLoader(DATA, sampler=weighted(60))
    kind = type("Kind", (Plain,), {"val_dataloader": lambda self: loader, "validation_step": lambda self, batch: None})
    with pytest.raises(NeedsTrainerError) as caught:
        adopted(kind)
    assert str(caught.value) == snapshot


def test_each_loader_has_its_own_workers() -> None:
    class Both(Plain):
        def train_dataloader(self) -> Any:
            return DataLoader(DATA, num_workers=2)

        def val_dataloader(self) -> Any:
            return DataLoader(DATA, num_workers=1)

        def validation_step(self, batch: Any) -> None: ...

    task, _ = adopted(Both)
    assert (task.workers, task.evaluation_workers) == (2, 1)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, shuffle=True, batch_size=4),
        DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=0)),
        DataLoader(DATA, batch_sampler=OWN_BATCHES),
        DataLoader(Endless(), batch_size=4),
    ],
)
def test_an_order_that_means_every_example_once_is_replaced(loader: Any) -> None:
    kind = type("Kind", (Plain,), {"train_dataloader": lambda self: loader})
    task, _ = adopted(kind)
    assert task.train is loader.dataset


@pytest.mark.parametrize(
    ("loader", "complaint"),
    [
        (
            DataLoader(DATA, batch_sampler=Buckets(range(40), 2, drop_last=True)),
            "batch_sampler Buckets",
        ),
        (DataLoader(DATA, sampler=Endlessly()), "Endlessly without __len__"),
        (DataLoader(DATA, batch_size=None), "batch_size is None, so the"),
    ],
)
def test_what_makes_batches_needs_lightnings_trainer(loader: Any, complaint: str) -> None:
    kind = type("Kind", (Plain,), {"train_dataloader": lambda self: loader})
    with pytest.raises(NeedsTrainerError) as caught:
        adopted(kind)
    assert complaint in str(caught.value)


def optimizer() -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=1.0)


def constant(of: SGD) -> LambdaLR:
    return LambdaLR(of, lambda step: 1.0)


@pytest.mark.parametrize(
    ("form", "schedules"),
    [
        (lambda o, s: o, []),
        (lambda o, s: [o], []),
        (lambda o, s: ([o], [s]), [("epoch", 1)]),
        (lambda o, s: ([o], [{"scheduler": s, "interval": "step", "frequency": 3}]), [("step", 3)]),
        (lambda o, s: {"optimizer": o}, []),
        (lambda o, s: {"optimizer": o, "lr_scheduler": s, "monitor": "val_loss"}, [("epoch", 1)]),
        (lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}, [("step", 1)]),
        (lambda o, s: [{"optimizer": o, "lr_scheduler": {"scheduler": s, "name": "rate"}}], [("epoch", 1)]),
    ],
)
def test_every_form_of_one_optimizer_is_accepted(form: Any, schedules: list[tuple[str, int]]) -> None:
    one = optimizer()
    scheduler = constant(one)
    found = read_configuration(form(one, scheduler))
    assert found.optimizer is one
    assert [(each.interval, each.frequency) for each in found.schedulers] == schedules
    assert all(each.scheduler is scheduler for each in found.schedulers)


@pytest.mark.parametrize(
    ("form", "complaint"),
    [
        (lambda o: None, "a NoneType; it must return an"),
        (lambda o: [o, optimizer()], "optimization takes one"),
        (lambda o: [{"optimizer": o}, {"optimizer": optimizer()}], "it returns 2 optimizers"),
        (lambda o: ([o, optimizer()], []), "it returns 2 optimizers"),
        (lambda o: {"optimiser": o}, 'no "optimizer", only optimiser'),
        (lambda o: {"optimizer": o, "lr_schedulers": constant(o)}, "lr_schedulers; it must return"),
        (lambda o: ["adam"], "str is not a torch optimizer"),
        (lambda o: {"optimizer": o, "lr_scheduler": ReduceLROnPlateau(o)}, "ReduceLROnPlateau needs"),
        (
            lambda o: ([o], [{"scheduler": ReduceLROnPlateau(o), "monitor": "error", "frequency": 2}]),
            "ReduceLROnPlateau is stepped",
        ),
        (
            lambda o: ([o], [constant(o), {"scheduler": ReduceLROnPlateau(o), "monitor": "error"}]),
            "ReduceLROnPlateau beside",
        ),
        (lambda o: ([o], [{"scheduler": constant(o), "reduce_on_plateau": True}]), "LambdaLR waits for a metric"),
        (
            lambda o: ([o], [{"scheduler": constant(o), "interval": "batch"}]),
            'must be "step" or "epoch"',
        ),
        (lambda o: ([o], [{"scheduler": constant(o), "frequency": 0}]), "be an integer of at least 1"),
        (lambda o: ([o], [{"scheduler": constant(o), "every": 2}]), "lr_scheduler has every"),
        (lambda o: ([o], [constant(optimizer())]), "LambdaLR belongs to another"),
        (lambda o: ([o], [0.1]), "scheduler: it must have step"),
    ],
)
def test_what_configure_optimizers_must_not_return_is_named(form: Any, complaint: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        read_configuration(form(optimizer()))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (None, "training_step returns None"),
        ({"los": 1}, "training_step returns None"),
        (0.5, "training_step: the loss is a"),
        (
            {"loss": torch.ones(()), "loss_weight": torch.ones((), requires_grad=True)},
            'training_step: "loss_weight"',
        ),
    ],
)
def test_a_training_step_without_a_loss_is_refused(given: Any, complaint: str) -> None:
    task, hooks = adopted(type("Kind", (Plain,), {"training_step": lambda self, batch: given}))
    hooks.step_begins([torch.ones(2, 1)], 1)
    with pytest.raises(UserCodeError) as caught:
        task.loss(task.model, [torch.ones(2, 1)])
    assert complaint in str(caught.value)


def test_a_module_sees_the_trainers_known_values_and_an_error_for_others(snapshot: SnapshotAssertion) -> None:
    spec = {"trainSteps": 24, "batch": {"global": 16, "perReplica": 1, "accumulation": 2}}
    task, _ = adopted(Plain, world=2, **spec)
    trainer = task.model.trainer
    # 40 examples make 2 steps of 16, each of 2 batches; 24 steps are 12 epochs of that.
    known = (trainer.estimated_stepping_batches, trainer.num_training_batches, trainer.max_epochs, trainer.world_size)
    assert known == (24, 4, 12, 2)
    assert (task.model.current_epoch, task.model.global_step) == (0, 0)
    assert isinstance(task.model.logger, ReportLogger)
    assert task.model.loggers == [task.model.logger]
    with pytest.raises(AttributeError) as caught:
        _ = trainer.strategy
    assert "trainer.strategy" in str(caught.value)
    assert str(caught.value) == snapshot
    assert task.model.local_rank == 0
    with pytest.raises(AttributeError) as caught:
        trainer.should_stop = True
    assert "trainer.should_stop" in str(caught.value)
    assert str(caught.value) == snapshot


class NoLightning(nn.Module):
    """Has the methods of a LightningModule, but not its class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    training_step, configure_optimizers = Plain.training_step, Plain.configure_optimizers
    train_dataloader = Plain.train_dataloader


def test_a_module_is_known_by_its_methods_not_by_its_class() -> None:
    assert is_lightning(NoLightning())
    assert not is_lightning(nn.Linear(1, 1))
    task, hooks = adopted(NoLightning)
    assert isinstance(hooks.configure([], hyperparameters()), SGD)
    assert task.evaluator is None
