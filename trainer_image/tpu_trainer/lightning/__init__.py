"""LightningModules as tasks, by duck typing: Lightning itself is never imported.

`module.adopt` makes a Task and Hooks of one; everything else here is a part of that.
"""

from __future__ import annotations

from tpu_trainer.lightning.module import adopt, is_lightning

__all__ = ["adopt", "is_lightning"]
