"""LightningModules that each want one thing that only Lightning's own Trainer does (`ONLY_UNDER_LIGHTNING`), and some
that look as if they did.

All learn the same: a sum of eight numbers.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import MeanSquaredError
from torchmetrics.classification import BinaryAUROC

from tpu_trainer import LightningRun

FEATURES = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(FEATURES, FEATURES.sum(dim=1, keepdim=True))
HELD_OUT = torch.utils.data.Subset(DATA, range(11))


class Plain(lightning.LightningModule):
    """`lr` is the recipe's scaled rate."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(8, 1)

    def loss(self, batch: Any) -> Tensor:
        features, target = batch
        return nn.functional.mse_loss(self.layer(features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=16, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(HELD_OUT, batch_size=4)


class Collects(Plain):
    """As Lightning's guide to its version 2 has it: outputs in a list, and a number of all of them at the end."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.outputs: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.outputs += self.layer(batch[0]).flatten().tolist()

    def on_validation_epoch_end(self) -> None:
        self.log("highest", max(self.outputs))
        self.outputs.clear()


class CollectsAndGathers(Collects):
    def on_validation_epoch_end(self) -> None:
        self.log("of_all", self.all_gather(torch.tensor(max(self.outputs))).max())
        super().on_validation_epoch_end()


class LayerOfSetup(Plain):
    """Has a layer more once it was set up."""

    def setup(self, stage: str) -> None:
        self.layer = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
        self.lr = 0.001


class Highest(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), reduce_fx=torch.max)


class ValidatesLoss(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.loss(batch))


class OwnStep(Plain):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        optimizer.param_groups[0]["lr"] = self.lr / 2


def asked(lr: float) -> LightningRun:
    return LightningRun(Plain(lr))


class Clipping(Plain):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1.0)


class WithTestStep(Plain):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.barrier()


class StrategyIfAny(Plain):
    def on_train_start(self) -> None:
        assert getattr(self.trainer, "strategy", None) is None


class LocalRank(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.local_rank


class Gan(Plain):
    """Two players that step in turn, each with an optimizer of its own."""

    automatic_optimization = False

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.judge = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, target = batch
        generator, judge = self.optimizers()
        judge.zero_grad()
        fake = self.layer(features)
        verdict = self.judge(target).mean() - self.judge(fake.detach()).mean()
        self.manual_backward(verdict + self.judge.weight.square().sum())
        self.clip_gradients(judge, gradient_clip_val=0.5)
        judge.step()
        generator.zero_grad()
        self.manual_backward(nn.functional.mse_loss(fake, target) - 0.01 * self.judge(fake).mean())
        generator.step()

    def configure_optimizers(self) -> Any:
        return [Adam(self.layer.parameters(), lr=self.lr), SGD(self.judge.parameters(), lr=self.lr)], []


class LeavesEpoch(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


class Accumulates(Plain):
    """Makes a step with the gradients of three batches."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / 3)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class StepsByItself(Plain):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()


class AsksForGradients(StepsByItself):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.layer.weight.grad, self.layer.bias.grad = torch.autograd.grad(self.loss(batch), [*self.parameters()])
        self.optimizers().step()


class WithoutOptimizer(Gan):
    """Changes its weights by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter -= self.lr * parameter.grad

    def configure_optimizers(self) -> None:
        return None


class OneOfTwo(Plain):
    """Automatic optimization, and still two optimizers: Lightning's Trainer refuses that itself."""

    def configure_optimizers(self) -> Any:
        return [SGD(self.parameters(), lr=self.lr), SGD(self.parameters(), lr=self.lr)]


class Callbacks(Plain):
    def configure_callbacks(self) -> Any:
        return [
            ModelCheckpoint(monitor="val_loss", save_top_k=1, filename="best"),
            EarlyStopping("val_loss", patience=100),
            LearningRateMonitor("step"),
        ]


class StopsEarly(Plain):
    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=1, stopping_threshold=1e9)]


class Logger(Plain):
    def on_train_epoch_end(self) -> None:
        self.logger.experiment.add_scalar("mine", 1.0, self.current_epoch)


class LogDirectory(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.logger.log_dir
        return super().training_step(batch, batch_idx)


class HalvesRate(Plain):
    """By a hook, after the evaluation of step 4."""

    def on_validation_epoch_end(self) -> None:
        if self.global_step == 4:
            self.optimizers().param_groups[0]["lr"] *= 0.5


class Plateau(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
                "monitor": "val_loss",
            },
        }


class TwoValidations(Plain):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self) -> Any:
        return [DataLoader(HELD_OUT, batch_size=4), DataLoader(DATA, batch_size=4)]


class Skips(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else self.loss(batch)


class Gathers(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, target = batch
        found = self.all_gather(self.layer(features), sync_grads=True)
        wanted = self.all_gather(target)
        return nn.functional.mse_loss(found, wanted)


class Unfreezes(Plain):
    """The second layer is frozen until the second epoch, when it joins the optimizer."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.backbone = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, target = batch
        return nn.functional.mse_loss(self.layer(self.backbone(features)), target)

    validation_step = None  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        return SGD(self.layer.parameters(), lr=self.lr)

    def configure_callbacks(self) -> Any:
        return [_Unfreeze()]


class _Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class StepPlateau(Plain):
    """Lowers its rate by the loss of every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss_of_step", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.8, patience=0, threshold=10.0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "loss_of_step", "interval": "step"}]


class Follows(Plain):
    """Its hooks, which Lightning calls last, change the weights after every step and every validation."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.layer.weight.data.mul_(1.05)

    def on_validation_end(self) -> None:
        self.layer.weight.data.mul_(1.05)


class Grows(Plain):
    """A callback changes something whenever an epoch begins, as BackboneFinetuning scales a rate."""

    def configure_callbacks(self) -> Any:
        return [LambdaCallback(on_train_epoch_start=lambda trainer, module: module.layer.weight.data.mul_(1.05))]


class Told(Plain):
    """Is told to stop in the step after TEST_STOP. Its callbacks wait for the validation and for both ends of an
    epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == int(os.environ["TEST_STOP"]):
            Path(os.environ["TEST_STOP_FILE"]).touch()

    def configure_callbacks(self) -> Any:
        def grow(trainer: Any, module: Any) -> None:
            module.layer.weight.data.mul_(1.05)

        return [
            EarlyStopping("val_loss", patience=100),
            LambdaCallback(on_train_epoch_start=grow, on_train_epoch_end=grow, on_validation_end=grow),
        ]


class Averages(Plain):
    """The callback averages running statistics, too, which each replica makes of its own examples, and frozen
    weights."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr / 10)
        self.layer = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1))
        self.error = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.error.update(self.layer(batch[0]), batch[1])
        self.log("val_loss", self.error)

    def configure_callbacks(self) -> Any:
        return [EMAWeightAveraging(decay=0.5)]


class Pruned(Plain):
    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured", amount=0.25)]


def bars(lr: float) -> LightningRun:
    return LightningRun(Plain(lr), callbacks=[TQDMProgressBar()])


class ShouldStop(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Only one replica wants to.
        if self.global_step == 6 and self.global_rank == 0:
            self.trainer.should_stop = True


class Auroc(Plain):
    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.auroc = BinaryAUROC()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        features, target = batch
        self.auroc.update(self.layer(features), (target > 0).int())
        self.log("auroc", self.auroc)


class Weighted(Plain):
    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=16, sampler=WeightedRandomSampler([1.0] * len(DATA), 64))


class Buckets(BatchSampler): ...


class OwnBatches(Plain):
    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_sampler=Buckets(RandomSampler(DATA), 8, drop_last=True))


class Eights(Dataset[Any]):
    """Its items are batches."""

    def __len__(self) -> int:
        return len(DATA) // 8

    def __getitem__(self, index: int) -> Any:
        return [tensor[8 * index : 8 * index + 8] for tensor in DATA.tensors]


class NoBatchSize(Plain):
    def train_dataloader(self) -> Any:
        return DataLoader(Eights(), batch_size=None, shuffle=True)


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return (DATA[index] for index in range(self.size))


class Streams(Plain):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(64), batch_size=16)

    def val_dataloader(self) -> Any:
        return DataLoader(Stream(11), batch_size=4)


class DictOfLoaders(Plain):
    def train_dataloader(self) -> Any:
        return {"few": DataLoader(DATA, batch_size=16), "many": DataLoader(DATA, batch_size=32)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert len(batch["many"][0]) == 2 * len(batch["few"][0])
        return self.loss(batch["few"]) + self.loss(batch["many"])


class Lbfgs(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class Raises(Plain):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ZeroDivisionError("mine")


class NotANumber(Callbacks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss / 0.0 if self.global_step == 5 else loss


class Stepped(Plain):
    """A scheduler of its own; with `LightningRun`."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


class Cycles(Plain):
    """Three steps of OneCycleLR, as a script computes them from a batch size of its own."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, self.lr, total_steps=3), "interval": "step"}]


class Anneals(Plain):
    """In epochs, of which the run has 2.5."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr)
        return [optimizer], [CosineAnnealingLR(optimizer, 100)]


def cycles(lr: float) -> LightningRun:
    return LightningRun(Cycles(lr))


def anneals(lr: float) -> LightningRun:
    return LightningRun(Anneals(lr))


def stepped(lr: float) -> LightningRun:
    return LightningRun(Stepped(lr))


def clipped(lr: float) -> LightningRun:
    return LightningRun(Plain(lr), gradient_clip_val=1e-3)


def decided(lr: float) -> LightningRun:
    return LightningRun(Plain(lr), max_steps=3)


def limited(lr: float, batches: float, whole: bool) -> LightningRun:
    return LightningRun(Plain(lr), limit_val_batches=int(batches) if whole else batches)


def unknown(lr: float) -> LightningRun:
    return LightningRun(Plain(lr), gradient_clip=1.0)


class Essentials(Gan):
    """What a gang must get right: two optimizers, a parameter that is unfrozen later, gathered rows, and a metric that
    keeps all values. Host 1 is told to stop after as many steps as TEST_STOP says."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.auroc = BinaryAUROC()
        self.later = nn.Parameter(torch.zeros(1), requires_grad=False)

    def prepare_data(self) -> None:
        """Lightning has the other processes wait for it."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.later.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        features, target = batch
        generator, _ = self.optimizers()
        generator.zero_grad()
        found = self.all_gather(self.layer(features) + self.later, sync_grads=True)
        self.manual_backward(nn.functional.mse_loss(found, self.all_gather(target)))
        generator.step()

    def configure_optimizers(self) -> Any:
        first, judge = super().configure_optimizers()[0]
        first.add_param_group({"params": [self.later]})
        return [first, judge], []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        features, target = batch
        self.auroc.update(self.layer(features), (target > 0.5).int())
        self.log("auroc", self.auroc)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and self.global_step == 3 * int(os.environ.get("TEST_STOP", "0")):
            os.kill(os.getpid(), signal.SIGTERM)


class MyFinder(LearningRateFinder):
    """A class of one's own does not hide what it is."""


REFUSED = {
    "LearningRateFinder": LearningRateFinder,
    "MyFinder": MyFinder,
    "BatchSizeFinder": BatchSizeFinder,
    "GradientAccumulationScheduler": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.1),
}


def refused(lr: float, callback: str) -> LightningRun:
    return LightningRun(Plain(lr), callbacks=[REFUSED[callback]()])


class Brings(Plain):
    """Brings a callback from configure_callbacks."""

    def configure_callbacks(self) -> Any:
        return [MyFinder()]


class _KeepsAFunction(Callback):
    """From step `since` on, which is what makes it impossible to keep."""

    def __init__(self, since: int) -> None:
        self.since, self.step, self.loaded = since, 0, None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "annealing": {"function": len, "rate": 0.5} if self.step >= self.since else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["annealing"] == {"rate": 0.5}


def keeps_a_function(lr: float, since: int) -> LightningRun:
    return LightningRun(Plain(lr), callbacks=[_KeepsAFunction(since)])


class _TriesRates(Callback):
    """Tries another rate for a step, and goes back to where it was."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        (optimizer,) = trainer.optimizers
        if trainer.global_step == 4:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/before.ckpt")
            optimizer.param_groups[0]["lr"] = 6.3
        if trainer.global_step == 5:
            before = torch.load(f"{trainer.default_root_dir}/before.ckpt", weights_only=False)
            module.load_state_dict(before["state_dict"])
            trainer.strategy.load_optimizer_state_dict(before)


def tries_rates(lr: float) -> LightningRun:
    return LightningRun(Plain(lr), callbacks=[_TriesRates()])


class ChangesPasses(Plain):
    """A callback that accumulates from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.accumulate_grad_batches = 2


class Halved(Plain):
    """Changes its weights at the end of the training; `HalvedByEpoch`, of each epoch."""

    where = "on_train_end"

    def _halve(self, name: str) -> None:
        if name == self.where:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.5)

    def on_train_epoch_end(self) -> None:
        self._halve("on_train_epoch_end")

    def on_train_end(self) -> None:
        self._halve("on_train_end")


class HalvedByEpoch(Halved):
    where = "on_train_epoch_end"


def halved(lr: float) -> LightningRun:
    return LightningRun(Halved(lr))


def halved_by_epoch(lr: float) -> LightningRun:
    return LightningRun(HalvedByEpoch(lr))


def pruned(lr: float) -> LightningRun:
    return LightningRun(Plain(lr), callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


class Centred(Plain):
    """Computes with a running centre, which each replica's own examples move."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.register_buffer("centre", torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, target = batch
        loss = self.loss((features - self.centre, target))
        self.centre.lerp_(features.mean(dim=0), 0.5)
        return loss


def centred(lr: float) -> LightningRun:
    return LightningRun(Centred(lr))


class OfEpoch(Dataset[Any]):
    """Its examples are the epoch in which they are read."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> float:
        return float(self.epoch)


class Curriculum(Plain):
    """Its loss is the epoch of its examples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch.float().mean() + 0 * self.layer.weight.sum()

    def train_dataloader(self) -> Any:
        return DataLoader(OfEpoch(), batch_size=16, num_workers=2, persistent_workers=True)


def curriculum(lr: float) -> LightningRun:
    return LightningRun(Curriculum(lr))


ONLY_UNDER_LIGHTNING = {
    *("Gan", "Callbacks", "StopsEarly", "LogDirectory", "Plateau", "TwoValidations", "Skips", "Gathers", "Unfreezes"),
    *("Grows", "Told", "Averages", "Pruned", "ShouldStop", "Weighted", "OwnBatches", "NoBatchSize", "Streams"),
    *("DictOfLoaders", "Lbfgs", "Raises", "NotANumber", "Essentials", "Brings", "ChangesPasses", "CollectsAndGathers"),
    *("LayerOfSetup", "Highest", "OwnStep", "StepsByItself", "AsksForGradients", "WithoutOptimizer"),
    *("StepPlateau", "Follows", "Accumulates"),
}
"""What the trainer's own loop refuses."""
