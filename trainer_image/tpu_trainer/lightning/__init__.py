"""LightningModules as tasks, by duck typing: Lightning itself is never imported."""

from __future__ import annotations

from tpu_trainer.lightning.module import adopt, is_lightning

__all__ = ["adopt", "is_lightning"]
