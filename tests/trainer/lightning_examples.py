"""Lightning's demo modules, and modules as its guides and examples have them, on data with a fixed order.

`gang` is the entrypoint of a job; `alone` trains the same with nothing but Lightning, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import BackboneFinetuning, EarlyStopping, EMAWeightAveraging
from pytorch_lightning.demos.boring_classes import BoringModel, ManualOptimBoringModel
from pytorch_lightning.demos.transformer import LightningTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from tpu_trainer import LightningRun
from tpu_trainer.data.order import permutation

BATCH, SEED, EPOCHS = 12, 3, 2
SIZE, HELD_OUT, WIDTH, CLASSES = 48, 11, 8, 3
"""Four steps are an epoch; no number of processes divides the held-out set."""


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


FEATURES = _random(SIZE, WIDTH)
LABELS = (FEATURES.sum(dim=1) > 0).long() + (FEATURES[:, 0] > 1).long()
LABELLED = TensorDataset(FEATURES, LABELS)
WITH_NOISE = TensorDataset(FEATURES, _random(SIZE, 4))
WORDS = TensorDataset(*torch.randint(0, 20, (2, SIZE, 5), generator=torch.Generator().manual_seed(1)))


class Rows(Dataset[Tensor]):
    """Tensors of 32 numbers, as the demo modules take them."""

    rows = _random(SIZE, 32)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Order:
    """The trainer's global batches, epoch by epoch."""

    def __init__(self) -> None:
        self.epochs = count()

    def __len__(self) -> int:
        return SIZE // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        return iter(permutation(SIZE, SEED, next(self.epochs)).reshape(-1, BATCH).tolist())


class Data(lightning.LightningDataModule):
    def __init__(self, dataset: Dataset[Any], *, alone: bool, loaders: int) -> None:
        super().__init__()
        self.dataset, self.alone, self.loaders = dataset, alone, loaders

    def train_dataloader(self) -> DataLoader[Any]:
        if self.alone:
            return DataLoader(self.dataset, batch_sampler=Order())
        return DataLoader(self.dataset, batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        held_out = Subset(self.dataset, range(HELD_OUT))
        loader = DataLoader(held_out, batch_size=4)
        return loader if self.loaders == 1 else [loader, DataLoader(held_out, batch_sampler=[[0, 1, 2], [3, 4], [5]])]


class Classifier(lightning.LightningModule):
    """The classifier of Lightning's quick start."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.backbone(features))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        loss = functional.cross_entropy(self(features), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        features, labels = batch
        scores = self(features)
        self.accuracy(scores, labels)
        self.log_dict({"val_loss": functional.cross_entropy(scores, labels), "val_accuracy": self.accuracy})

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=0.02)


class OnPlateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Clamped(Classifier):
    """Changes its gradients, and lowers its rate by the loss of a step."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.02, 0.02)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.02)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss", "interval": "step"},
        }


class WarmUp(Classifier):
    """The warm-up by hand of Lightning's guide to `optimizer_step`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (self.trainer.global_step + 1) / 6


class SecondOrder(Classifier):
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), lr=0.1, max_iter=3)


class TwoLoaders(Classifier):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        features, labels = batch
        self.log("val_loss", functional.cross_entropy(self(features), labels) * (1 + dataloader_idx))


class Autoencoder(lightning.LightningModule):
    """The autoencoder of Lightning's first example, with a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, _ = batch
        return functional.mse_loss(self.decoder(self.encoder(features)), features)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Adversarial(lightning.LightningModule):
    """The GAN of Lightning's examples; its noise comes with the data, so that it does not depend on the slice."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, WIDTH), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        verdict = self.discriminator(self.generator(noise))
        loss = functional.binary_cross_entropy_with_logits(verdict, ones)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = functional.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        fake = self.discriminator(self.generator(noise).detach())
        self.manual_backward((loss + functional.binary_cross_entropy_with_logits(fake, zeros)) / 2)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [Adam(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)]
        return optimizers, [ExponentialLR(optimizer, 0.5) for optimizer in optimizers]


class Contrastive(Autoencoder):
    """Compares every example with all examples of the global batch, and measures over the whole held-out set."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = BinaryAUROC()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, _ = batch
        here = self.all_gather(self.encoder(features), sync_grads=True).reshape(-1, 3)
        there = self.all_gather(self.encoder(features.flip(1)), sync_grads=True).reshape(-1, 3)
        return functional.cross_entropy(here @ there.T, torch.arange(len(here)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        self.auroc.update(self.encoder(features)[:, 0].sigmoid(), (labels > 0).int())
        self.log("val_auroc", self.auroc)


class Translator(LightningTransformer):
    """Lightning's demo, with neither its download nor its dropout, which draws other numbers in each replica."""

    def __init__(self) -> None:
        super().__init__(vocab_size=20)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0

    def prepare_data(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Example:
    module: Callable[[], Any]
    dataset: Dataset[Any] = LABELLED
    options: Callable[[], dict[str, Any]] = field(default=dict)
    loaders: int = 1
    epochs: int = EPOCHS

    def run(self, *, alone: bool) -> LightningRun:
        return LightningRun(self.module(), Data(self.dataset, alone=alone, loaders=self.loaders), **self.options())


EXAMPLES: Mapping[str, Example] = {
    "demo: BoringModel": Example(BoringModel, Rows()),
    "demo: ManualOptimBoringModel": Example(ManualOptimBoringModel, Rows()),
    # Its rates are so high that rounding grows to visible differences.
    "demo: LightningTransformer": Example(Translator, WORDS, lambda: {"precision": "64-true"}),
    "classifier": Example(Classifier),
    "classifier, clipped": Example(Classifier, options=lambda: {"gradient_clip_val": 0.1}),
    "classifier, on a plateau": Example(OnPlateau),
    "classifier, clamped": Example(Clamped),
    "classifier, warm-up by hand": Example(WarmUp),
    "classifier, LBFGS": Example(SecondOrder),
    "classifier, two validations": Example(TwoLoaders, loaders=2),
    "classifier, average": Example(Classifier, options=lambda: {"callbacks": [EMAWeightAveraging(decay=0.5)]}),
    "classifier, fine-tuning": Example(Classifier, options=lambda: {"callbacks": [BackboneFinetuning(1)]}),
    "classifier, stopped early": Example(
        Classifier, options=lambda: {"callbacks": [EarlyStopping("val_loss", min_delta=9.0, patience=1)]}, epochs=4
    ),
    "autoencoder": Example(Autoencoder),
    "GAN": Example(Adversarial, WITH_NOISE),
    "contrastive": Example(Contrastive),
}


def gang(name: str) -> LightningRun:
    return EXAMPLES[name].run(alone=False)


@cache
def alone(name: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights and the metrics of a training by Lightning, with the trainer's global batches."""
    torch.manual_seed(SEED)
    example = EXAMPLES[name]
    run = example.run(alone=True)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=example.epochs, **quiet, **run.options)
    trainer.fit(run.module, datamodule=run.data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    return run.module.state_dict(), metrics
