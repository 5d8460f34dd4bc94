"""Finds the user's `module:callable`, calls it, and says plainly what is wrong when it is not there."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple

from tpu_trainer.by_name import arguments
from tpu_trainer.data import Share
from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.hooks import Hooks
from tpu_trainer.lightning import adopt, is_lightning
from tpu_trainer.task import Hyperparameters, Task

ALONE = Share(rank=0, world=1)


class Loaded(NamedTuple):
    """What the loop trains, and what it calls on its way."""

    task: Task
    hooks: Hooks


def load_task(entrypoint: str, hyperparameters: Hyperparameters, share: Share = ALONE) -> Loaded:
    """Imports `entrypoint` from sys.path (PYTHONPATH and the working directory) and calls it.

    `share` is what a LightningModule is told as its trainer's rank and world size.

    Raises:
        UserCodeError: there is no such module or attribute, it cannot be called or not with this recipe, it raised,
            returned something that is no task, or a LightningModule that needs what this trainer has not.
    """
    factory = _find(entrypoint)
    positional, keywords = arguments(factory, hyperparameters, entrypoint)
    with user_code(f"calling {entrypoint}"):
        made = factory(*positional, **keywords)
    if isinstance(made, Task):
        return Loaded(made, Hooks())
    module, data = made if isinstance(made, tuple | list) and len(made) == 2 else (made, None)
    if is_lightning(module):
        return Loaded(*adopt(module, data, hyperparameters, share))
    raise UserCodeError(
        f"entrypoint {entrypoint}: returned {_described(made)}; it must return a tpu_trainer.Task, a LightningModule, "
        "or a pair (LightningModule, LightningDataModule)"
    )


def _find(entrypoint: str) -> Any:
    """The callable that `entrypoint` names."""
    module_name, _, attribute = entrypoint.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the user's module imports may be the missing one; then the traceback says more.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            with user_code(f"importing {module_name}"):
                raise
        raise UserCodeError(
            f"entrypoint {entrypoint}: there is no module {error.name}; its directory must be the working directory or "
            "in PYTHONPATH"
        ) from None
    except (Exception, SystemExit):
        with user_code(f"importing {module_name}"):
            raise
    factory = getattr(module, attribute, None)
    if factory is None:
        raise UserCodeError(
            f"entrypoint {entrypoint}: module {module_name} ({module.__file__}) has no {attribute}; it defines "
            f"{', '.join(_callables(module)) or 'no callable'}"
        )
    if not callable(factory):
        raise UserCodeError(
            f"entrypoint {entrypoint}: {attribute} is a {type(factory).__name__}; it must be a function or a class"
        )
    return factory


def _described(made: object) -> str:
    if isinstance(made, tuple | list):
        return f"a {type(made).__name__} of {', '.join(type(item).__name__ for item in made) or 'nothing'}"
    return f"a {type(made).__name__}"


def _callables(module: object) -> list[str]:
    """Names of the functions and classes that the module itself defines."""
    owner = getattr(module, "__name__", None)
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == owner
    )
