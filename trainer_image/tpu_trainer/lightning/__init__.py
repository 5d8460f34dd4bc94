"""Trains LightningModules as tasks in the trainer's own loop, by duck typing: Lightning itself is never imported.

Under `trainer.loop: Lightning` they are trained by Lightning's own Trainer (`lightning_trainer`).
"""

from __future__ import annotations

from tpu_trainer.lightning.lightning_run import LightningRun
from tpu_trainer.lightning.module import adopt, is_lightning

__all__ = ["LightningRun", "adopt", "is_lightning"]
