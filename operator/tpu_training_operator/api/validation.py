"""Turns plain data into a job, or into a list of problems that say what to change. Never a traceback."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tpu_training_operator.api import meant, slice_names
from tpu_training_operator.api.constants import API_VERSION, GROUP, KIND
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.model import PATTERN_MEANINGS, ApiModel, Rule
from tpu_training_operator.api.text import one_line, plain

_LONGEST = 1000
_WRITTEN = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "spec.trainer.code.sha256": "it with `tpujob submit --code FOLDER`, which packs the folder",
}
# Kinds that run containers, and where what they say goes.
_RUNS = re.compile("(Job|Set|Pod|Deployment|Cluster)$")
_MOVES = ": the container's image, command and env go to spec.trainer, and spec.slice says how many run"


@dataclass(frozen=True)
class Problem:
    """What is wrong with one field, given as a path like spec.slice.topology, and what would be right."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidJob(Exception):
    """The object is not a valid TPUTrainingJob; `problems` has at least one reason."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def parse_job(data: Mapping[str, Any], *, except_rules: tuple[Rule, ...] = ()) -> TPUTrainingJob:
    """Returns the job that `data` describes. Raises InvalidJob.

    `except_rules`: rules that are not applied, because `tpujob plan` can compute some jobs that a cluster would refuse.
    """
    try:
        job = TPUTrainingJob.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidJob(_schema_problems(error, data)) from None
    problems = list(_broken_rules(job, "", except_rules))
    if problems:
        raise InvalidJob(problems)
    return job


def _broken_rules(model: ApiModel, path: str, excepted: tuple[Rule, ...]) -> Iterator[Problem]:
    for rule in type(model).rules:
        if rule not in excepted and rule.is_broken_by(model):
            yield Problem(_join(path, rule.field), rule.text(model))
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, ApiModel):
            yield from _broken_rules(value, _join(path, field.alias or name), excepted)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ApiModel):
                    yield from _broken_rules(item, f"{_join(path, field.alias or name)}[{index}]", excepted)


def _join(path: str, field: str) -> str:
    return ".".join(part for part in (path, field) if part)


def _schema_problems(error: ValidationError, data: Mapping[str, Any]) -> list[Problem]:
    kind, version = data.get("kind"), data.get("apiVersion")
    is_named = isinstance(kind, str) and kind.isalnum() and isinstance(version, str) and version.isprintable()
    if is_named and kind != KIND and not str(version).startswith(f"{GROUP}/"):
        moves = _MOVES if _RUNS.search(str(kind)) else ""
        return [Problem("kind", f"this is a {kind} ({version}); a job is a {KIND} ({API_VERSION}){moves}")]
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        # A name that is no text is no path either: the message is about its mapping.
        path = _path(detail["loc"][:-1] if detail["type"] == "invalid_key" else detail["loc"])
        # A union (a number or a string) reports one error per branch; the first is enough.
        problems.setdefault(path, Problem(path, plain(one_line(_message(detail), _LONGEST))))
    return list(problems.values())


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    # A union appends the name of its branch, as in resources.limits.cpu.int.
    for part in location[:-1] if location[-1] in ("int", "str", "constrained-str") else location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text = _join(text, part)
    return text


def _message(detail: ErrorDetails) -> str:
    value, context, location = detail["input"], detail.get("ctx", {}), detail["loc"]
    match detail["type"]:
        case "missing":
            written = _WRITTEN.get(_path(location))
            return f"is required; write {written}" if written else "is required"
        case "extra_forbidden":
            return meant.unknown_field(location, value)
        case "string_type":
            return meant.text(value)
        case "enum" | "literal_error":
            expected = str(context["expected"]).replace("'", "").replace(" or ", ", ")
            if ", " not in expected:
                return f"must be {expected}, not {value!r:.60}"
            return f"{value!r:.60} is not one of {expected}{meant.member(value, expected.split(', '))}"
        case "string_pattern_mismatch":
            if choice := re.fullmatch(r"\^\(([A-Za-z|]+)\)\$", context["pattern"]):
                members = choice[1].split("|")
                return f"{value!r:.60} is not one of {', '.join(members)}{meant.member(value, members)}"
            explained = PATTERN_MEANINGS.get(context["pattern"], f"of the form {context['pattern']}")
            return f"{value!r} {explained(value)}" if callable(explained) else f"{value!r} is not {explained}"
        case "string_too_long":
            return slice_names.generation_hint(value) or f"has {len(value)} characters; at most {context['max_length']}"
        case "string_too_short" if not value:
            return "is empty"
        case "too_short":
            return f"needs at least {context['min_length']} item; leave the field out if there is none"
        case "too_long":
            return f"has {context['actual_length']} items; at most {context['max_length']}"
        case "greater_than_equal":
            return f"{value} is too small; the minimum is {context['ge']}"
        case "less_than_equal":
            return f"{value} is too large; the maximum is {context['le']}"
        case "int_type" if location[-1] == "int":
            return f'{value!r} is not a quantity such as 4, "500m" or "16Gi"{meant.quantity(value)}'
        case "int_type" | "int_parsing" | "int_from_float":
            return meant.whole_number(location, value)
        case "bool_type" | "bool_parsing":
            return meant.boolean(value)
        case "model_type":
            return meant.mapping(location, value)
        case "dict_type" | "mapping_type":
            return meant.names_to_values(location, value)
        case "list_type":
            return meant.items(location, value)
        case "invalid_key":
            return f"{value!r} is not text: YAML reads on, off, yes and no as true or false; put the name in quotes"
        case "not_the_number":
            return detail["msg"]
        case _:
            return detail["msg"][:1].lower() + detail["msg"][1:]
