"""The arguments of a call, found by the names of its parameters in the recipe.

A parameter takes the recipe's free-form parameter of its name, else the hyperparameter of its name, else its own
default. A misspelt name is an error and never silent: a run of days with a default nobody meant costs more than a stop.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from tpu_trainer.errors import UserCodeError
from tpu_trainer.task import Hyperparameters

OBJECT_NAMES = ("hp", "hyperparameters")
"""A parameter of these names is given the whole Hyperparameters object."""

ALIASES = {"lr": "learning_rate"}
"""Other names by which a hyperparameter is known: what most public modules call it."""

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_FROM_TEXT = (bool, int, float, str)


def arguments(function: Callable[..., Any], hp: Hyperparameters, entrypoint: str) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments for `function`.

    Raises:
        UserCodeError: a parameter is to be found nowhere, a text does not fit its type, or nothing takes one of the
            recipe's parameters.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        # A callable written in C tells nothing of its parameters.
        return [hp], {}
    hints = _hints(function)
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    known = _known(hp)
    whole = {p.name for p in named if _is_whole(p, hints)} or _only_one(named, hints, hp, known)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for parameter in named:
        value = hp if parameter.name in whole else _value(parameter, hints.get(parameter.name), hp, known, entrypoint)
        if value is inspect.Parameter.empty:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                # Given as well: those behind it can only be given after it.
                positional.append(parameter.default)
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            keywords[parameter.name] = value
    unused = [name for name in hp.parameters if name not in {p.name for p in named}]
    if takes_rest:
        keywords |= {name: as_written(hp.parameters[name]) for name in unused}
    elif unused and not whole:
        raise UserCodeError(
            f"entrypoint {entrypoint}: recipe.parameters has {', '.join(unused)}, which it does not take; its "
            f"parameters are {', '.join(p.name for p in named) or 'none'}"
        )
    return positional, keywords


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Annotations as types; as they are written where they name something that cannot be found at run time."""
    target = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    try:
        return get_type_hints(target)
    except Exception:
        return getattr(target, "__annotations__", {})


def _is_whole(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    hint = hints.get(parameter.name)
    if isinstance(hint, str):
        return hint.rpartition(".")[2] == Hyperparameters.__name__
    return hint is Hyperparameters or (hint is None and parameter.name in OBJECT_NAMES)


def _only_one(
    named: list[inspect.Parameter], hints: Mapping[str, Any], hp: Hyperparameters, known: Mapping[str, Any]
) -> set[str]:
    """A function of one required parameter, without annotation and of a name that says nothing, takes the object."""
    required = [p for p in named if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
    if len(required) == 1:
        (only,) = required
        if only.name not in hints and only.name not in hp.parameters and only.name not in known:
            return {only.name}
    return set()


def _known(hp: Hyperparameters) -> dict[str, Any]:
    """The hyperparameters by name."""
    own = {field.name: getattr(hp, field.name) for field in fields(hp) if field.name not in ("parameters", "silent")}
    return own | {alias: own[name] for alias, name in ALIASES.items()}


def _value(
    parameter: inspect.Parameter, hint: Any, hp: Hyperparameters, known: Mapping[str, Any], entrypoint: str
) -> Any:
    """The parameter's value; `empty` where its own default stands."""
    name, has_default = parameter.name, parameter.default is not parameter.empty
    if name in hp.parameters:
        wanted = _wanted(hint, parameter.default)
        try:
            return from_text(hp.parameters[name], wanted)
        except ValueError as error:
            raise UserCodeError(f"entrypoint {entrypoint}: recipe.parameters.{name}: {error}") from None
    if name in known and not (has_default and name in hp.silent):
        return known[name]
    if has_default:
        return parameter.empty
    raise UserCodeError(
        f"entrypoint {entrypoint}: nothing is known for its parameter {name}; recipe.parameters has "
        f"{', '.join(sorted(hp.parameters)) or 'none'}, and the hyperparameters are {', '.join(sorted(known))}"
    )


def _wanted(hint: Any, default: Any) -> Any:
    """The type a text is made into: the annotation's, else the default's; None where there is neither."""
    if hint is None:
        return None if default is inspect.Parameter.empty or default is None else type(default)
    if get_origin(hint) in (Union, types.UnionType):
        return next((kind for kind in get_args(hint) if kind is not type(None)), str)
    if isinstance(hint, str):
        return {kind.__name__: kind for kind in _FROM_TEXT}.get(hint.removesuffix(" | None"), hint)
    return str if hint is Any else hint


_WHOLE = re.compile(r"-?(0|[1-9][0-9]*)")
_REAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def as_written(text: str) -> bool | int | float | str:
    """What a text means that nothing gives a type: a number or a truth value as JSON writes it, else the text.

    "007", "1_000", ".5" and "yes" stay texts.
    """
    if text in ("true", "false"):
        return text == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _REAL.fullmatch(text) else text


def from_text(text: str, kind: Any) -> bool | int | float | str:
    """`text` as a bool, int, float or str, or as it is written where `kind` is None. An int may be written "1e3".

    Raises:
        ValueError: the text is none, or `kind` is another type.
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
            return _whole(text, number) if kind is int else number
        except (ValueError, OverflowError):
            raise ValueError(f'expected {"an integer" if kind is int else "a number"}, got "{text}"') from None
    name = getattr(kind, "__name__", str(kind))
    raise ValueError(f"a {name} cannot be made from a text; take bool, int, float or str, or the object as `hp`")


def _whole(text: str, number: float) -> int:
    # A long integer is not exact as a float.
    if number != int(number):
        raise ValueError(text)
    return int(text) if text.strip().lstrip("+-").isdecimal() else int(number)
