"""Lightning under the name by which the user's module knows it, and this package's parts as classes of it.

`lightning.pytorch` and `pytorch_lightning` are the same code with different classes: a Trainer of one does not take a
module of the other. So a class that extends one of Lightning's is put together at run time.
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


def package_of(module: nn.Module, why: str) -> Any:
    """The package whose LightningModule `module` is; `why`: what needs it.

    Raises:
        UserCodeError: it is none.
    """
    if (name := _package_name(module)) is not None and isinstance(
        module, importlib.import_module(name).LightningModule
    ):
        _quieten(name)
        return importlib.import_module(name)
    raise UserCodeError(
        f"{why}. Only Lightning's own Trainer does that, and {type(module).__name__} is not a LightningModule: derive "
        "it from pytorch_lightning.LightningModule"
    )


def refuse_mixed(module: nn.Module, parts: Iterable[object]) -> None:
    """Lightning itself ends with "Expected a parent".

    Raises:
        UserCodeError: one of the parts is of the other package than the module.
    """
    name = _package_name(module)
    for part in parts:
        if _package_name(part) not in (None, name):
            raise UserCodeError(
                f"{type(module).__name__} is of {name} and {type(part).__name__} of {_package_name(part)}, which"
                f" Lightning's Trainer does not take together: import both from {name}"
            )


def _package_name(part: object) -> str | None:
    """The package that the nearest class of Lightning's below `part`'s is of; None for a part of neither."""
    bases = [f"{owner.__module__}." for owner in type(part).__mro__]
    return next((name for base in bases for name in _PACKAGES if base.startswith(f"{name}.")), None)


def as_kind_of(base: type, methods: type) -> Any:
    """A class with `methods` before those of `base`."""
    return type(methods.__name__, (methods, base), {})


def _quieten(name: str) -> None:
    """Lightning advertises, and describes devices that it was not asked to use."""
    logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric" if name == "lightning.pytorch" else "lightning_fabric").setLevel(
        logging.WARNING
    )
    for text in (
        # The order of examples continues where it was, whatever the loader can do.
        ".*ended before the epoch ended and your dataloader is.*not resumable.*",
        # A number for one process per machine, not for a gang.
        ".*does not have many workers which may be a bottleneck.*",
        # The report has the loss of every step.
        ".*is smaller than the logging interval.*",
    ):
        warnings.filterwarnings("ignore", message=text)
