"""Finds the user's `module:callable`, calls it with the recipe, and explains what is wrong if that fails.

Arguments are found by the names of the callable's parameters. A parameter takes the recipe's free-form parameter of its
name, else the hyperparameter of its name, else its own default. A misspelt name is an error: to train for days with an
unintended default costs more than to stop.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tpu_contract.run_spec import Loop
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.data.order import Share
from tpu_trainer.lightning import LightningRun, adopt, is_lightning
from tpu_trainer.task.hooks import Hooks
from tpu_trainer.task.task import Hyperparameters, Task

OBJECT_NAMES = ("hp", "hyperparameters")
"""A parameter of one of these names gets the whole Hyperparameters object."""

ALIASES = {"lr": "learning_rate"}
"""Other names of hyperparameters, which most public modules use."""

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_FROM_TEXT = (bool, int, float, str)
_WHOLE = re.compile(r"-?(0|[1-9][0-9]*)")
_REAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class Loaded(NamedTuple):
    """The task that the loop trains, and the hooks that it calls."""

    task: Task
    hooks: Hooks


def load_entrypoint(
    entrypoint: str, hyperparameters: Hyperparameters, loop: str, share: Share
) -> Loaded | LightningRun:
    """Imports `entrypoint` from sys.path (PYTHONPATH and the working directory) and calls it.

    `loop`: the job's `trainer.loop`. `share`: rank and world size for a LightningModule's trainer.

    Raises:
        UserCodeError: there is no such module or attribute, it cannot be called with this recipe, it raised, or it
            did not return what this loop trains.
    """
    factory = _find(entrypoint)
    positional, keywords = arguments(factory, hyperparameters, entrypoint)
    with user_code(f"calling {entrypoint}"):
        made = factory(*positional, **keywords)
    if isinstance(made, LightningRun):
        return made
    if isinstance(made, Task):
        if loop == Loop.LIGHTNING:
            raise UserCodeError(f"entrypoint {entrypoint}: returned a Task; trainer.loop: Lightning is for modules")
        return Loaded(made, made.hooks or Hooks())
    module, data = made if isinstance(made, tuple | list) and len(made) == 2 else (made, None)
    if is_lightning(module):
        if loop == Loop.LIGHTNING:
            return LightningRun(module, data)
        return Loaded(*adopt(module, data, hyperparameters, share))
    kind = f"a {type(made).__name__}"
    if isinstance(made, tuple | list):
        kind += f" of {', '.join(type(item).__name__ for item in made) or 'nothing'}"
    raise UserCodeError(
        f"entrypoint {entrypoint}: returned {kind}; it must return a tpu_trainer.Task, a LightningModule, "
        "a pair (LightningModule, LightningDataModule), or a tpu_trainer.LightningRun"
    )


def _find(entrypoint: str) -> Any:
    """Imports the callable that `entrypoint` names."""
    module_name, _, attribute = entrypoint.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # If the user's module imports a module that is missing, the traceback is more helpful.
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
        callables = sorted(
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        )
        raise UserCodeError(
            f"entrypoint {entrypoint}: module {module_name} ({module.__file__}) has no {attribute}; it defines "
            f"{', '.join(callables) or 'no callable'}"
        )
    if not callable(factory):
        raise UserCodeError(
            f"entrypoint {entrypoint}: {attribute} is a {type(factory).__name__}; it must be a function or a class"
            f"{' that returns it' if isinstance(factory, Task) else ''}"
        )
    return factory


def arguments(function: Callable[..., Any], hp: Hyperparameters, entrypoint: str) -> tuple[list[Any], dict[str, Any]]:
    """Returns positional and keyword arguments for `function`.

    Raises:
        UserCodeError: a parameter has no value, a text does not fit its type, or nothing takes one of the recipe's
            parameters.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        # A callable written in C may have no signature.
        return [hp], {}
    hints = _hints(function)
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    known = _by_name(hp)
    takes_object = {p.name for p in named if _takes_object(p, hints)} or _only_parameter(named, hints, hp, known)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for parameter in named:
        is_object, hint = parameter.name in takes_object, hints.get(parameter.name)
        value = hp if is_object else _value(parameter, hint, hp, known, entrypoint)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            # Its default is passed, too: without it, later parameters could not be passed by position.
            positional.append(parameter.default if value is parameter.empty else value)
        elif value is not parameter.empty:
            keywords[parameter.name] = value
    unused = [name for name in hp.parameters if name not in {p.name for p in named}]
    if takes_rest:
        keywords |= {name: as_written(hp.parameters[name]) for name in unused}
    elif unused and not takes_object:
        raise UserCodeError(
            f"entrypoint {entrypoint}: recipe.parameters has {', '.join(unused)}, which it does not take; its "
            f"parameters are {', '.join(p.name for p in named) or 'none'}"
        )
    return positional, keywords


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the annotations as types, or as text if they name something that does not exist at run time."""
    target = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    try:
        return get_type_hints(target)
    except Exception:
        return getattr(target, "__annotations__", {})


def _takes_object(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    hint = hints.get(parameter.name)
    if isinstance(hint, str):
        return hint.rpartition(".")[2] == Hyperparameters.__name__
    return hint is Hyperparameters or (hint is None and parameter.name in OBJECT_NAMES)


def _only_parameter(
    named: list[inspect.Parameter], hints: Mapping[str, Any], hp: Hyperparameters, known: Mapping[str, Any]
) -> set[str]:
    """Returns the name of a single required parameter, if it has no annotation and its name is no hyperparameter's: it
    takes the Hyperparameters object."""
    required = [p for p in named if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
    if len(required) == 1:
        (only,) = required
        if only.name not in hints and only.name not in hp.parameters and only.name not in known:
            return {only.name}
    return set()


def _by_name(hp: Hyperparameters) -> dict[str, Any]:
    """Returns the hyperparameters by name."""
    values = {field.name: getattr(hp, field.name) for field in fields(hp) if field.name not in ("parameters", "silent")}
    return values | {alias: values[name] for alias, name in ALIASES.items()}


def _value(
    parameter: inspect.Parameter, hint: Any, hp: Hyperparameters, known: Mapping[str, Any], entrypoint: str
) -> Any:
    """Returns the parameter's value; `empty` if its own default applies."""
    name, has_default = parameter.name, parameter.default is not parameter.empty
    if name in hp.parameters:
        try:
            return from_text(hp.parameters[name], _target_type(hint, parameter.default))
        except ValueError as error:
            raise UserCodeError(f"entrypoint {entrypoint}: recipe.parameters.{name}: {error}") from None
    if name in known and not (has_default and name in hp.silent):
        return known[name]
    if has_default:
        return parameter.empty
    raise UserCodeError(
        f"entrypoint {entrypoint}: its parameter {name} has no value; recipe.parameters has "
        f"{', '.join(sorted(hp.parameters)) or 'none'}, and the hyperparameters are {', '.join(sorted(known))}"
    )


def _target_type(hint: Any, default: Any) -> Any:
    """Returns the type to convert a text to: the annotation's, else the default's; None without either."""
    if hint is None:
        return None if default is inspect.Parameter.empty or default is None else type(default)
    if get_origin(hint) in (Union, types.UnionType):
        return next((kind for kind in get_args(hint) if kind is not type(None)), str)
    if isinstance(hint, str):
        return {kind.__name__: kind for kind in _FROM_TEXT}.get(hint.removesuffix(" | None"), hint)
    return str if hint is Any else hint


def as_written(text: str) -> bool | int | float | str:
    """Returns the value of an untyped text: a number or a truth value in JSON's notation, else the text itself.

    "007", "1_000", ".5" and "yes" stay texts.
    """
    if text in ("true", "false"):
        return text == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _REAL.fullmatch(text) else text


def from_text(text: str, kind: Any) -> Any:
    """Converts `text` to a bool, int, float, str or path, or to a value of a Literal or an Enum (by value or name).
    Without `kind`, converts it as `as_written` does. An int may be written "1e3".

    Raises:
        ValueError: the text does not fit, or `kind` is another type.
    """
    if kind is None:
        return as_written(text)
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise ValueError(f'expected true or false, got "{text}"')
        return _TRUTH[text.lower()]
    if kind in (int, float):
        try:
            number = float(text)
            return _as_int(text, number) if kind is int else number
        except (ValueError, OverflowError):
            raise ValueError(f'expected {"an integer" if kind is int else "a number"}, got "{text}"') from None
    if get_origin(kind) is Literal:
        return _choose(text, {str(value): value for value in get_args(kind)})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choose(text, {**{str(member.value): member for member in kind}, **kind.__members__})
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return kind(text)
    name = getattr(kind, "__name__", str(kind))
    raise ValueError(
        f"a {name} cannot be made from a text; take bool, int, float, str, a path, a Literal or an Enum, or the object "
        "as `hp`"
    )


def _choose(text: str, values: Mapping[str, Any]) -> Any:
    if text not in values:
        raise ValueError(f'expected one of {", ".join(values)}, got "{text}"')
    return values[text]


def _as_int(text: str, number: float) -> int:
    # A long integer is not exact as a float.
    if number != int(number):
        raise ValueError(text)
    return int(text) if text.strip().lstrip("+-").isdecimal() else int(number)
