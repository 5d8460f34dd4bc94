"""Lightning's own Trainer: as a user writes it, with one line for the callback."""

import os
import sys

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tpu_trainer.callbacks.lightning import TPUJobCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        features, labels = batch
        return cross_entropy(self.net(features), labels)

    def validation_step(self, batch, batch_idx):
        features, labels = batch
        self.log("val_acc", (self.net(features).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def loader(count):
    features = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(features, (features.sum(1) > 0).long()), batch_size=8)


def main(folder):
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        num_nodes=int(os.environ.get("TPUJOB_NUM_HOSTS", "1")),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=int(os.environ.get("MAX_STEPS", "20")),
        accumulate_grad_batches=2,
        val_check_interval=8,
        check_val_every_n_epoch=None,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=8), TPUJobCallback()],
    )
    trainer.fit(Classifier(), loader(256), loader(32), ckpt_path="last")
    print("trained", trainer.global_step, "on", trainer.world_size, flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ["SCRIPT_FOLDER"])
