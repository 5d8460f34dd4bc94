"""Guesses what a person meant by a field or a value that the API lacks, so that a refusal says what to write."""

import difflib
import json
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.model import ApiModel, models_in

Location = tuple[int | str, ...]

_MOST = 3
# Shorter ones are parts of other words.
_WORD = 4
# As spec.recipe.optimizer.name: what lies deeper is only known to those who know where it is.
_DEEP = 4
_TYPE = "acceleratorType"
_METADATA = ("name", "namespace", "labels", "annotations", "generateName")


@cache
def _words() -> dict[str, dict[str, str]]:
    """Returns what to write for the words of other operators, frameworks and schedulers, in small letters and digits.

    A text without a blank is a field; one without a dot counts only where the field exists.
    """
    texts = json.loads(resources.files(__package__).joinpath("meant.json").read_text(encoding="utf-8"))
    return {
        part: {word: text for text, words in rows.items() for word in words.split()} for part, rows in texts.items()
    }


def _normal(name: object) -> str:
    return re.sub("[^a-z0-9]", "", str(name).lower())


def _fields(model: type[ApiModel] | None) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()} if model else {}


def _model_of(field: FieldInfo | None) -> type[ApiModel] | None:
    return next(models_in(field.annotation), None) if field else None


def _field_at(location: Location) -> FieldInfo | None:
    model, field = _ROOT, None
    for part in location:
        if isinstance(part, str):
            field = _fields(model).get(part)
            model = _model_of(field)
    return field


_ROOT: type[ApiModel] | None = TPUTrainingJob


@cache
def _every_field() -> dict[tuple[str, ...], str]:
    """Returns every field of a job, with its path as people write it: spec.ladder.rungs[].steps."""

    def walk(model: type[ApiModel] | None, names: tuple[str, ...], path: str) -> Iterator[tuple[tuple[str, ...], str]]:
        for alias, field in _fields(model).items():
            yield (*names, alias), path + alias
            yield from walk(_model_of(field), (*names, alias), f"{path}{alias}{'[]' if _is_list(field) else ''}.")

    return dict(walk(_ROOT, (), ""))


def _is_list(field: FieldInfo) -> bool:
    return "list[" in str(field.annotation)


def unknown_field(location: Location, value: object) -> str:
    """Says what to write in place of a field that does not exist there."""
    above, name = tuple(part for part in location[:-1] if isinstance(part, str)), str(location[-1])
    if name in _METADATA and above in ((), ("spec",)):
        return f"unknown field; did you mean metadata.{name}?"
    here, wanted = list(_fields(_model_of(_field_at(above)) if above else _ROOT)), _normal(name)
    if same := [known for known in here if _normal(known) == wanted]:
        return f"unknown field; did you mean {same[0]}?"
    named = {names: path for names, path in _every_field().items() if _normal(names[-1]) == wanted}
    # One level deeper, or beside or in what this is a part of.
    close = {names for names in named if above == names[:-2] or names[:-1] == above[: len(names) - 1]}
    fitting = {names for names in named if (field := _field_at(names)) and _taken(field, value) is not None}
    far = {
        names for names, path in named.items() if names[:2] == above[:2] or ("[]" not in path and len(names) <= _DEEP)
    }
    starts = (wanted,) if wanted else ()
    parts = [
        one for one in here if _normal(one).startswith(starts) or (len(wanted) >= _WORD and wanted in _normal(one))
    ]
    foreign = _words()["fields"].get(wanted, "")
    if above[-1:] == ("tunedOn",) and "GPU" in foreign:
        return f"unknown field; write {_TYPE}: v5litepod-N for N GPUs"
    if not re.search("[ .]", foreign) and foreign not in (*here, *([] if parts else ["metadata"])):
        foreign = ""
    if chosen := close & fitting or (not foreign and (fitting & far or (not parts and (close or far)))):
        shortest = sorted((path for names, path in named.items() if names in chosen), key=lambda path: path.count("."))
        return f"unknown field; did you mean {' or '.join(shortest[:_MOST])}?"
    if foreign:
        return f"unknown field; {foreign if ' ' in foreign else f'did you mean {foreign}?'}"
    near = list(dict.fromkeys([*difflib.get_close_matches(name, here, n=_MOST, cutoff=0.6), *parts]))
    if not near and here[:2] == ["name", "value"] and not isinstance(value, dict | list):
        return f"unknown field; write {{name: {name}, value: {value}}}"
    return f"unknown field; nearest: {', '.join(near[:_MOST])}" if near else f"unknown field; known: {', '.join(here)}"


def member(value: object, members: list[str]) -> str:
    """Returns which of the members was meant, as a question in brackets; empty if nothing is near."""
    wanted = _normal(value)
    near = [known for known in members if _normal(known) == wanted or known == _words()["members"].get(wanted)]
    near += [known for known in members if len(known) >= _WORD and _normal(known) in wanted]
    near += difflib.get_close_matches(str(value), members, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def mapping(location: Location, value: object) -> str:
    """Says how to write the mapping that belongs there."""
    model = _model_of(_field_at(location)) or TPUTrainingJob
    only = value[0] if isinstance(value, list) and len(value) == 1 else None
    if found := _fitting(model, value) or _fitting(model, only):
        return f"must be a mapping of fields; write {found}"
    if isinstance(only, dict):
        return "must be a mapping of fields; leave out the '-', which begins a list"
    return f"{'is empty' if value is None else 'must be a mapping of fields'}; it has {', '.join(_fields(model))}"


def _fitting(model: type[ApiModel], value: object) -> str:
    """Returns the mapping with the field that takes the value, and with what else is required; empty if none does."""
    fields = _fields(model)
    if isinstance(value, str) and "=" in value and list(fields)[:2] == ["name", "value"]:
        return "{{name: {}, value: {}}}".format(*value.split("=", 1))
    for alias, field in fields.items() if isinstance(value, int | float | str | list) and value is not True else ():
        taken, inner = _taken(field, value), _model_of(field)
        if alias == _TYPE and not re.fullmatch(r"[\w-]+", str(value)):
            continue
        if isinstance(value, list):
            lists = [name for name, other in fields.items() if _is_list(other)]
            shown = "[...]" if taken is not None or lists == [alias] else ""
        elif taken is None:
            shown = _fitting(inner, value) if inner is not None and not _is_list(field) and field.is_required() else ""
        else:
            shown = str(taken) if field.is_required() or alias == next(iter(fields)) or taken != value else ""
        if shown and value is not False:
            others = [f", {name}: ..." for name, other in fields.items() if other.is_required() and name != alias]
            return f"{{{alias}: {shown}{''.join(others)}}}"
    return ""


def _taken(field: FieldInfo, value: object) -> Any:
    """Returns the value, or the member that it names in other letters; None if the field takes neither."""
    for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str):
            return next((one.value for one in kind if _normal(one.value) == _normal(value)), None)
    try:
        TypeAdapter(field.rebuild_annotation()).validate_python(value)
    except ValidationError:
        return None
    return value


_KEYS = {"persistentVolumeClaim": "claimName", "secret": "secretName", "csi": "driver"}


def names_to_values(location: Location, value: object) -> str:
    """Says how to write a mapping whose names the API does not bound."""
    field = str(location[-1])
    shown = value if isinstance(value, str) and value.isprintable() else "digits" if field == "metadata" else "VALUE"
    is_named = field in _KEYS or field.endswith(("Ref", "Map")) or field == "metadata"
    return f"must be a mapping, such as {{{_KEYS.get(field, 'name') if is_named else 'NAME'}: {shown}}}"


def items(location: Location, value: object) -> str:
    """Says how to write the list that belongs there."""
    model = _model_of(_field_at(location))
    if model is None:
        if isinstance(value, str) and re.fullmatch(r"\s*\[.*\]\s*", value):
            return f"must be a list; write {value.strip()} without quotes around it"
        if isinstance(value, str) and re.search(r"[\n;&|<>$`]", value.strip()):
            return "must be a list; write [bash, -c, SCRIPT] for what a shell is to run"
        words = [] if isinstance(value, dict) else re.split("[ ,]+", str(value).strip())
        return f"must be a list; write [{', '.join(words)}]" if words else "must be a list; put '- ' before each item"
    fields = _fields(model)
    if isinstance(value, dict) and value and next(iter(value)) not in fields:
        (first, one), (second, two), *_ = fields.items()
        (key, inner), *_ = value.items()
        if not isinstance(inner, dict) and _taken(one, key) is not None and _taken(two, inner) is not None:
            return f"must be a list; write - {{{first}: {key}, {second}: {inner}}}"
    if found := _fitting(model, value):
        return f"must be a list; write [{found}]"
    return f"must be a list; put '- ' before each item, a mapping with {', '.join(fields)}"


_MULTIPLES = {"k": 1000, "m": 10**6}
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def whole_number(location: Location, value: object) -> str:
    """Says what to write for something that is not a whole number."""
    counted = next((unit for unit in ("Steps", "Epochs", "Seconds", "Hours") if unit in str(location[-1])), "")
    refusal = ("is empty; it must be" if value is None else f"{value!r:.60} is not") + " a whole number"
    refusal += f" of {counted.lower()}" if counted else ""
    if isinstance(value, float) and value.is_integer():
        return f"{refusal}; write {int(value)}"
    if isinstance(value, str) and re.search(r"[$<{]", value):
        return f"{refusal}: it is a placeholder that nothing has replaced"
    match = re.fullmatch(r"([0-9][0-9_,]*)\s*([a-z]*)", value.strip().lower()) if isinstance(value, str) else None
    number = int(re.sub("[_,]", "", match[1])) if match and len(match[1]) <= len("9,223,372,036,854,775,807") else None
    if match is None or number is None:
        return refusal
    units = {"": 1, **(_SECONDS if counted == "Seconds" else _MULTIPLES)}
    unquoted = "" if match[2] or "," in match[1] else " without quotes"
    return f"{refusal}; write {number * units[match[2]]}{unquoted}" if match[2] in units else refusal


def quantity(value: object) -> str:
    """Says how Kubernetes writes the amount, if it is a fraction or has another unit."""
    if isinstance(value, float) and 0 < value < 1:
        return f'; write "{round(value * 1000)}m"'
    match = re.fullmatch(r"([0-9.]+) *((?i:v?cpus?|cores?)|([KMGT])i?[Bb])", str(value))
    return f"; write {match[1]}{match[3] + 'i' if match[3] else ''}" if match else ""


def text(value: object) -> str:
    """Says what to write for something that is not text."""
    if isinstance(value, bool):
        word = "true" if value else "false"
        return f'YAML reads this as {word}, as it does yes, no, on and off; write it in quotes, as "{word}"'
    if isinstance(value, int | float):
        return f'{value} is a number; write it as a string: "{value}"'
    if value is None:
        return 'is empty; write a text, "" for none'
    if isinstance(value, dict | list):
        return f"is a {'mapping' if isinstance(value, dict) else 'list'}; it must be one text"
    return f'must be a text; write it in quotes, as "{value!s:.60}"'


def boolean(value: object) -> str:
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "false", "no", "off"):
        return f"{value!r} is text; write {str(value.lower() in ('true', 'yes', 'on')).lower()} without quotes"
    return f"{value!r:.60} is neither true nor false"
