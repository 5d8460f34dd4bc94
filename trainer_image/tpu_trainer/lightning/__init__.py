"""Trains LightningModules as tasks in the trainer's own loop, by duck typing: Lightning itself is never imported.

Modules that need more are trained by Lightning's own Trainer (`lightning_trainer`).
"""

from __future__ import annotations

from tpu_trainer.lightning.module import adopt, detach, is_lightning
from tpu_trainer.lightning.needs import LightningRun, NeedsTrainerError

__all__ = ["LightningRun", "NeedsTrainerError", "adopt", "detach", "is_lightning"]
