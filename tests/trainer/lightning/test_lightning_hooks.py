"""Parts of Lightning that change how a step is made, and what a checkpoint keeps of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LambdaLR, MultiStepLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from tests.trainer.task.test_task import hyperparameters
from tests.trainer.whole_runs import run
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.order import Share
from tpu_trainer.lightning import adopt
from tpu_trainer.loop.entrypoint import Loaded
from tpu_trainer.optim.optimizers import find_unused_settings
from tpu_trainer.optim.schedulers import build_schedulers
from tpu_trainer.task.hooks import Hooks
from tpu_trainer.task.task import Hyperparameters, Task

EPOCH = 3
"""Steps in an epoch of 48 examples."""


class Line(lightning.LightningModule):
    def __init__(self, schedule: Callable[[SGD, int], Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 1.0)
        self.schedule = schedule

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 3 * self.layer(batch[0]).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(48, 1)))

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        if self.schedule is None:
            return optimizer
        return [optimizer], [self.schedule(optimizer, self.trainer.estimated_stepping_batches)]


def test_what_training_steps_log_is_reported_as_means_over_all_processes() -> None:
    class Logging(Line):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rank = float(self.trainer.global_rank)
            self.log("plain", rank)
            self.log("of epochs", rank + batch_idx, on_step=False, on_epoch=True)
            self.log_dict({"both": batch_idx}, on_epoch=True, prog_bar=True)
            self.log("weighted", torch.tensor(rank), batch_size=1 + 3 * int(rank))
            self.log("sum", 2, reduce_fx="sum")
            self.log("metric", self.mean(rank))
            self.log("object", self.mean)
            self.log("for the bar only", 1.0, logger=False)
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss + 1)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("at the end", self.current_epoch, on_epoch=True)

    def made(hp: Any, rank: int) -> Loaded:
        return Loaded(*adopt(Logging(), None, hp, Share(rank, 2)))

    metrics = dict(run(made, 2, trainSteps=2 * EPOCH).outcome.metrics)
    assert metrics.pop("loss") < 0
    assert metrics == {
        "plain": 0.5,
        "of epochs": 1.5,
        "both_step": 2.0,
        "both_epoch": 1.0,
        "weighted": pytest.approx(0.8),
        "sum": 4.0,
        "metric": 0.5,
        "object": 0.5,
        "at the end": 1.0,
    }


def test_a_reduction_that_cannot_be_made_is_refused() -> None:
    class Largest(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("largest", 1.0, reduce_fx="max")
            return super().training_step(batch, batch_idx)

    outcome = run(lambda hp, rank: Loaded(*adopt(Largest(), None, hp, Share(0, 1))), trainSteps=2).outcome
    assert outcome.message.startswith('self.log("largest", reduce_fx=max): ')


class Run:
    """A task under the calls that the loop makes, one process, on the CPU."""

    def __init__(self, module: lightning.LightningModule, steps: int = 24, **recipe: Any) -> None:
        self.hp = hyperparameters(trainSteps=steps, **recipe)
        self.task: Task
        self.hooks: Hooks
        self.task, self.hooks = adopt(module, None, self.hp, Share(0, 1))
        self.optimizer = self.hooks.configure(module.parameters(), self.hp)
        self.schedules = build_schedulers(self.task, self.hooks, self.optimizer, self.hp)
        self.module, self.done = module, 0
        self.rates: list[float] = []

    def begin(self, step: int = 0, epoch: int = 0) -> Run:
        self.done = step
        self.hooks.step_made(step)
        self.schedules.fast_forward(self.optimizer, step, epoch)
        self.hooks.fit_begins(self.optimizer, step)
        self.hooks.train_begins()
        self.hooks.epoch_begins(epoch)
        return self

    def steps(self, count: int) -> Run:
        for _ in range(count):
            if self.done and self.done % EPOCH == 0:
                self.hooks.epoch_ends(self.done // EPOCH - 1)
                self.schedules.after("epoch", self.done // EPOCH)
                self.hooks.epoch_begins(self.done // EPOCH)
            self.done += 1
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            batch = [torch.ones(16, 1)]
            self.hooks.step_begins(batch, self.done)
            loss = self.task.loss(self.module, batch)
            self.hooks.before_backward(loss)
            loss.backward()
            self.hooks.after_backward()
            self.hooks.before_update(self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.hooks.step_made(self.done)
            self.schedules.after("step", self.done)
            self.hooks.after_step(batch, loss.detach(), self.done)
        return self


class Clipping(Line):
    algorithm = "norm"

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm=self.algorithm)


class ClippingByValue(Clipping):
    algorithm = "value"


@pytest.mark.parametrize("kind", [Clipping, ClippingByValue])
def test_a_module_clips_the_gradients_before_the_update(kind: type[Line]) -> None:
    module = kind()
    Run(module).begin().steps(1)
    # The gradient is 3, clipped to 0.5, at a rate of 1.
    assert module.layer.weight.item() == pytest.approx(0.5, abs=1e-5)


class ClippingAsAsked(Line):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        assert self.trainer.gradient_clip_val == gradient_clip_val
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def test_a_module_that_clips_gets_the_recipes_norm_and_the_trainer_says_so_and_leaves_the_clipping_to_it() -> None:
    module = ClippingAsAsked()
    made = Run(module, gradientClipNorm="0.25").begin().steps(1)
    assert module.layer.weight.item() == pytest.approx(0.75, abs=1e-5)
    assert made.hooks.clips
    (said,) = (text for text in find_unused_settings(made.task, made.hooks, made.optimizer, made.hp) if "clip" in text)
    assert "recipe.gradientClipNorm 0.25" in said


def test_a_module_that_does_not_clip_is_clipped_by_the_trainer() -> None:
    def made(hp: Hyperparameters, rank: int) -> Loaded:
        return Loaded(*adopt(Line(), None, hp, Share(rank, 2)))

    ran = run(made, 2, trainSteps=1, gradientClipNorm="0.25", batch={"global": 16, "perReplica": 8})
    assert ran.norms == [pytest.approx(3.0)]
    assert ran.weights()[0].item() == pytest.approx(0.75, abs=1e-5)


class Clamping(Line):
    """Its gradient is 3 on rank 0 and 9 on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (1 + 2 * self.trainer.global_rank) * super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.layer.weight.grad.clamp_(max=4.0)


@pytest.mark.parametrize(("clip", "end"), [(None, -3.0), ("0.25", 0.75)])
def test_a_module_changes_the_averaged_gradients_before_they_are_clipped(clip: str | None, end: float) -> None:
    def made(hp: Hyperparameters, rank: int) -> Loaded:
        return Loaded(*adopt(Clamping(), None, hp, Share(rank, 2)))

    ran = run(made, 2, trainSteps=1, **({} if clip is None else {"gradientClipNorm": clip}))
    assert ran.weights()[0].item() == pytest.approx(end, abs=1e-5)


def test_without_a_scheduler_the_recipes_schedule_holds() -> None:
    assert not Run(Line()).hooks.scheduled


SCHEDULES: dict[str, Callable[[SGD, int], Any]] = {
    "one cycle": lambda o, n: {"scheduler": OneCycleLR(o, 2.0, total_steps=n), "interval": "step"},
    "cosine": lambda o, n: {"scheduler": CosineAnnealingLR(o, n), "interval": "step"},
    "every second step": lambda o, n: {
        "scheduler": LambdaLR(o, lambda k: 0.5**k),
        "interval": "step",
        "frequency": 2,
    },
    "epochs": lambda o, n: MultiStepLR(o, [2, 4]),
    "chained": lambda o, n: {"scheduler": ChainedScheduler([CosineAnnealingLR(o, n)], optimizer=o), "interval": "step"},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("at", [3, 7, 9])
def test_after_a_resume_the_rates_are_those_of_a_run_that_never_stopped(name: str, at: int) -> None:
    whole = Run(Line(SCHEDULES[name])).begin().steps(15)
    first = Run(Line(SCHEDULES[name])).begin().steps(at)
    second = Run(Line(SCHEDULES[name]))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    kept = first.hooks.state()
    second.hooks.load(kept)
    second.begin(at, kept["epoch"])
    # At an epoch's end the loop calls the hooks of it again: the checkpoint was taken before them.
    second.steps(15 - at)
    assert first.rates + second.rates == whole.rates


def test_a_run_resumed_with_another_number_of_steps_follows_the_new_schedule() -> None:
    schedule = SCHEDULES["one cycle"]
    first = Run(Line(schedule), steps=24).begin().steps(8)
    second = Run(Line(schedule), steps=12)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.hooks.load(first.hooks.state())
    second.begin(4).steps(8)
    assert second.rates == Run(Line(schedule), steps=12).begin().steps(12).rates[4:]


class Keeping(Line):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert set(checkpoint["state_dict"]) == {"layer.weight"}
        checkpoint["mine"] = {"seen": 5, "mean": torch.tensor([1.0])}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.index = batch_idx


def test_a_checkpoint_keeps_what_the_module_adds_and_where_the_epoch_stands() -> None:
    state = Run(Keeping()).begin().steps(5).hooks.state()
    assert set(state["module"]) == {"mine"}
    module = Keeping()
    run = Run(module)
    run.hooks.load(state)
    run.begin(5, epoch=1).steps(1)
    assert module.loaded["seen"] == 5
    assert (module.current_epoch, module.index, module.global_step) == (1, 2, 6)


class Transferring(Line):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        assert device == torch.device("cpu")
        return [batch[0] * 10]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] - 1]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.started = batch[0]


def test_a_batch_passes_the_hooks_on_its_way_to_the_device_once_and_in_order() -> None:
    module = Transferring()
    run = Run(module).begin()
    batch = run.task.collate([(torch.tensor([1.0]),)] * 2)
    run.hooks.step_begins(batch, 1)
    assert module.started.tolist() == [[19.0], [19.0]]
    assert run.task.loss(module, batch).item() == 57.0


class Logging(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, on_step=True, prog_bar=True, logger=True, sync_dist=True)
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return loss


def test_a_logged_tensor_is_kept_on_its_device_and_without_its_graph() -> None:
    module = Logging()
    Run(module).begin().steps(1)
    kept = module.trainer.callback_metrics
    assert isinstance(kept["train/loss"], Tensor)
    assert not kept["train/loss"].requires_grad
    assert (kept["train/loss"].item(), kept["rate"]) == (3.0, 1.0)


def test_no_tensor_of_a_step_outlives_it_in_the_hooks() -> None:
    run = Run(Logging()).begin().steps(1)
    held = [value for value in vars(run.hooks).values() if isinstance(value, Tensor | list | dict) and len(value)]
    assert held == []


class Skipping(Line):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class Raising(Line):
    def on_train_epoch_start(self) -> None:
        raise KeyError("labels.csv")


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [(Skipping, "on_train_batch_start returns"), (Raising, "on_train_epoch_start:")],
)
def test_a_hook_that_fails_is_named(kind: type[Line], complaint: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        Run(kind()).begin().steps(1)
    assert complaint in str(caught.value)
