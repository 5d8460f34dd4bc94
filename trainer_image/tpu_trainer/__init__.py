"""The worker image's trainer: data-parallel PyTorch from one run spec, on TPU chips or on CPU hosts.

Users import `Task`, `Hyperparameters` and `LightningRun` from here to write an entrypoint; the operator and the local
runner start `python -m tpu_trainer`. The names are loaded on first use because importing torch takes seconds, and a
process that only has to say "bad run spec" should not pay for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_trainer.lightning.needs import LightningRun
    from tpu_trainer.task import Hyperparameters, Task

__all__ = ["Hyperparameters", "LightningRun", "Task"]


def __getattr__(name: str) -> Any:
    if name == "LightningRun":
        from tpu_trainer.lightning import needs

        return needs.LightningRun
    if name in __all__:
        from tpu_trainer import task

        return getattr(task, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
