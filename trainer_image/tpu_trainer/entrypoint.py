"""Finds the user's `module:callable`, calls it, and says plainly what is wrong when it is not there."""

from __future__ import annotations

import importlib
import importlib.util

from tpu_trainer.errors import UserCodeError, user_code
from tpu_trainer.task import Hyperparameters, Task


def load_task(entrypoint: str, hyperparameters: Hyperparameters) -> Task:
    """Imports `entrypoint` from sys.path (PYTHONPATH and the working directory) and calls it.

    Raises:
        UserCodeError: there is no such module or attribute, it cannot be called, it raised, or it returned something
            other than a Task.
    """
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
            f"entrypoint {entrypoint}: {attribute} is a {type(factory).__name__}; it must be a function that takes "
            "Hyperparameters and returns a Task"
        )
    with user_code(f"calling {entrypoint}"):
        task = factory(hyperparameters)
    if not isinstance(task, Task):
        raise UserCodeError(
            f"entrypoint {entrypoint}: returned a {type(task).__name__}; it must return a tpu_trainer.Task"
        )
    return task


def _callables(module: object) -> list[str]:
    """Names of the functions and classes that the module itself defines."""
    owner = getattr(module, "__name__", None)
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == owner
    )
