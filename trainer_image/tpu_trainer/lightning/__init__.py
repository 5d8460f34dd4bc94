"""LightningModules as tasks, by duck typing: Lightning itself is never imported.

What this cannot do, Lightning's own Trainer does (`lightning_trainer`).
"""

from __future__ import annotations

from tpu_trainer.lightning.module import adopt, is_lightning, release
from tpu_trainer.lightning.needs import LightningRun, NeedsTrainerError

__all__ = ["LightningRun", "NeedsTrainerError", "adopt", "is_lightning", "release"]
