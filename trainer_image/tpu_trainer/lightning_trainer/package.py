"""Imports the Lightning package that the user's module derives from, and derives classes from its classes.

`lightning.pytorch` and `pytorch_lightning` are the same code with different classes: a Trainer of one does not take a
module of the other. So a class that extends one of Lightning's is built at run time.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tpu_trainer.contract.errors import UserCodeError

if TYPE_CHECKING:
    from torch import nn

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def package_of(module: nn.Module) -> Any:
    """Returns the Lightning package of `module`.

    Raises:
        UserCodeError: the module is not a LightningModule.
    """
    if (name := _package_name(module)) is not None and isinstance(
        module, importlib.import_module(name).LightningModule
    ):
        _quieten(name)
        return importlib.import_module(name)
    raise UserCodeError(
        f"Lightning's own Trainer trains LightningModules, and {type(module).__name__} is none: derive it from "
        "pytorch_lightning.LightningModule, or leave out trainer.loop"
    )


def refuse_mixed(module: nn.Module, parts: Iterable[object]) -> None:
    """Raises UserCodeError if a part and the module are of different packages; Lightning would only say "Expected a
    parent"."""
    name = _package_name(module)
    for part in parts:
        if _package_name(part) not in (None, name):
            raise UserCodeError(
                f"{type(module).__name__} is from {name} and {type(part).__name__} from {_package_name(part)}; "
                f"Lightning's Trainer does not take both: import both from {name}"
            )


def _package_name(part: object) -> str | None:
    """Returns the package of the nearest base class that is Lightning's; None without one."""
    bases = [f"{owner.__module__}." for owner in type(part).__mro__]
    return next((name for base in bases for name in _PACKAGES if base.startswith(f"{name}.")), None)


def derive(base: type, methods: type) -> Any:
    """Returns a subclass of `base` whose methods `methods` overrides."""
    return type(methods.__name__, (methods, base), {})


def _quieten(name: str) -> None:
    """Silences Lightning's advertisements, its list of devices, and warnings that do not apply here."""
    logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric" if name == "lightning.pytorch" else "lightning_fabric").setLevel(
        logging.WARNING
    )
    for text in (
        # The trainer resumes the order of examples, whatever the loader can do.
        ".*ended before the epoch ended and your dataloader is.*not resumable.*",
        # Its advice is for one process per machine, not for a gang.
        ".*does not have many workers which may be a bottleneck.*",
        # The report has the loss of every step.
        ".*is smaller than the logging interval.*",
    ):
        warnings.filterwarnings("ignore", message=text)
