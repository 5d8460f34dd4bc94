"""Trains a LightningModule with Lightning's own Trainer, on this gang, with this recipe and this job's checkpoints.

Loop, hooks, callbacks and optimizers are Lightning's; backends, order of examples, checkpoint format, doctor and
reports are the trainer's. Lightning is imported only here, by name: the rest of the trainer runs without it.
"""

from __future__ import annotations

from tpu_trainer.lightning_trainer.run import LightningTraining

__all__ = ["LightningTraining"]
