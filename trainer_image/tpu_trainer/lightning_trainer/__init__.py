"""Trains a LightningModule with Lightning's own Trainer, on this gang, with this recipe and this job's checkpoints.

Lightning's loop, hooks, callbacks and optimizers; the trainer's backends, order of examples, checkpoint format, doctor
and reports. Lightning is imported only here, by name: the rest of the trainer runs without it.
"""

from __future__ import annotations

from tpu_trainer.lightning_trainer.run import OwnTrainer

__all__ = ["OwnTrainer"]
