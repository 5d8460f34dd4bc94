"""What a LightningModule cannot have in the trainer's own loop, each with an error that names the line to change, and
what its `self.trainer` has."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.trainer.task.test_task import hyperparameters
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.order import Share
from tpu_trainer.lightning import adopt, is_lightning
from tpu_trainer.lightning.optimizers import read_configuration
from tpu_trainer.task.board import ReportLogger

THE_LINE = "set spec.trainer.loop: Lightning in the job, or return tpu_trainer.LightningRun(module, data)"

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


class NoData(lightning.LightningModule):
    training_step, configure_optimizers = Plain.training_step, Plain.configure_optimizers


class NoStep(lightning.LightningModule):
    def configure_optimizers(self) -> Any: ...


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


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


def test_a_pair_without_a_data_module_is_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UserCodeError) as caught:
        adopted(Plain, DataLoader(DATA))
    assert str(caught.value) == snapshot


OWN_BATCHES = BatchSampler(SequentialSampler(DATA), 2, drop_last=True)


class Buckets(BatchSampler): ...


class OwnOrder(RandomSampler):
    """A random sampler that is not torch's."""


def overriding(name: str) -> dict[str, Any]:
    return {name: lambda self, *_: None}


def training_on(loader: Any) -> dict[str, Any]:
    return {"train_dataloader": lambda self: loader}


def validating_on(loader: Any) -> dict[str, Any]:
    return {"val_dataloader": lambda self: loader, "validation_step": lambda self, batch: None}


FEATURES: list[tuple[dict[str, Any], str]] = [
    ({"automatic_optimization": False}, "Kind.automatic_optimization = False"),
    (overriding("backward"), "Kind.backward()"),
    (overriding("optimizer_step"), "Kind.optimizer_step()"),
    (overriding("optimizer_zero_grad"), "Kind.optimizer_zero_grad()"),
    (overriding("configure_callbacks"), "Kind.configure_callbacks()"),
    (
        {"training_step": lambda self, batch, batch_idx, more: None},
        "takes (batch, batch_idx, more), not (batch)",
    ),
    (training_on([DataLoader(DATA), DataLoader(DATA)]), "train_dataloader() returns a list of 2"),
    (training_on({"few": DataLoader(DATA)}), "train_dataloader() returns a dict"),
    (training_on(DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 40, 40))), "with a WeightedRandomSampler"),
    (training_on(DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=12))), "with a RandomSampler that draws"),
    (training_on(DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True))), "with a RandomSampler that draws"),
    (training_on(DataLoader(DATA, sampler=OwnOrder(DATA))), "with a OwnOrder"),
    (training_on(DataLoader(DATA, batch_sampler=Buckets(range(40), 2, drop_last=True))), "a Buckets as batch_sampler"),
    (training_on(DataLoader(DATA, batch_size=None)), "train_dataloader() with batch_size=None"),
    (validating_on(DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 40, 40))), "val_dataloader() with a Weigh"),
    (validating_on(DataLoader(Endless())), "val_dataloader() over an iterable dataset"),
]


@pytest.mark.parametrize(("feature", "named"), FEATURES)
def test_what_only_lightnings_trainer_does_is_an_error_that_names_the_line(feature: dict[str, Any], named: str) -> None:
    with pytest.raises(UserCodeError) as refusal:
        adopted(type("Kind", (Plain,), feature))
    assert named in str(refusal.value)
    assert THE_LINE in str(refusal.value)


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
    found, stepped = read_configuration(form(one, scheduler))
    assert found is one
    assert [(stepped.interval, stepped.frequency)] if stepped else schedules == []
    assert stepped is None or stepped.scheduler is scheduler


@pytest.mark.parametrize(
    ("form", "complaint"),
    [
        (lambda o: None, "a NoneType; it must return an"),
        (lambda o: {"optimiser": o}, "its dict has optimiser; it must return"),
        (lambda o: {"optimizer": o, "lr_schedulers": constant(o)}, "lr_schedulers; it must return"),
        (lambda o: ["adam"], "str is not a torch optimizer"),
        (lambda o: {"optimizer": o, "lr_scheduler": ReduceLROnPlateau(o)}, "ReduceLROnPlateau needs"),
        (
            lambda o: ([o], [{"scheduler": ReduceLROnPlateau(o), "monitor": "error", "frequency": 2}]),
            "ReduceLROnPlateau is stepped",
        ),
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
    ("form", "named"),
    [
        (lambda o: [o, optimizer()], "configure_optimizers returns 2 optimizers and 0 schedulers"),
        (lambda o: [{"optimizer": o}, {"optimizer": optimizer()}], "configure_optimizers returns 2 optimizers"),
        (lambda o: ([o, optimizer()], []), "configure_optimizers returns 2 optimizers"),
        (lambda o: ([o], [constant(o), constant(o)]), "configure_optimizers returns 1 optimizers and 2 schedulers"),
        (lambda o: ([o], [{"scheduler": constant(o), "reduce_on_plateau": True}]), "LambdaLR waits for a metric"),
    ],
)
def test_several_optimizers_or_schedulers_are_an_error_that_names_the_line(form: Any, named: str) -> None:
    with pytest.raises(UserCodeError) as refusal:
        read_configuration(form(optimizer()))
    assert named in str(refusal.value)
    assert THE_LINE in str(refusal.value)


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
    assert THE_LINE in str(caught.value)
    assert str(caught.value) == snapshot
    assert task.model.local_rank == 0
    with pytest.raises(AttributeError) as caught:
        trainer.should_stop = True
    assert "trainer.should_stop" in str(caught.value)
    assert THE_LINE in str(caught.value)
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
