"""The worker image's trainer: data-parallel PyTorch from one run spec, on TPU chips or on CPU hosts.

Users import what an entrypoint needs from here (`__all__`); the operator and the local runner start
`python -m tpu_trainer`. The names are loaded on first use, because importing torch takes seconds and a process
that only reports a bad run spec should not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_trainer.lightning.lightning_run import LightningRun
    from tpu_trainer.task.board import SummaryWriter
    from tpu_trainer.task.hooks import Hooks
    from tpu_trainer.task.logbook import log
    from tpu_trainer.task.task import Hyperparameters, Task

__all__ = ["Hooks", "Hyperparameters", "LightningRun", "SummaryWriter", "Task", "log"]

_FROM = {
    "Hooks": "task.hooks",
    "Hyperparameters": "task.task",
    "LightningRun": "lightning.lightning_run",
    "SummaryWriter": "task.board",
    "Task": "task.task",
    "log": "task.logbook",
}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
