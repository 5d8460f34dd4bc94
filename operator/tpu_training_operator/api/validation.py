"""Turns plain data into a job, or into a list of problems that say what to change. Never a traceback."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.model import PATTERN_MEANINGS, ApiModel, Rule, models_in


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
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        path = _path(detail["loc"])
        # A union (a number or a string) reports one error per branch; the first is enough.
        problems.setdefault(path, Problem(path, _message(detail)))
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
    value, context = detail["input"], detail.get("ctx", {})
    match detail["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return _unknown_field(detail["loc"])
        case "string_type" if isinstance(value, int | float) and not isinstance(value, bool):
            return f'{value} is a number; write it as a string: "{value}"'
        case "enum" | "literal_error":
            expected = str(context["expected"]).replace("'", "").replace(" or ", ", ")
            nearest = difflib.get_close_matches(str(value), expected.split(", "), n=1, cutoff=0.6)
            hint = f" (did you mean {nearest[0]}?)" if nearest else ""
            return f"{value!r} is not one of {expected}{hint}"
        case "string_pattern_mismatch":
            meaning = PATTERN_MEANINGS.get(context["pattern"], f"of the form {context['pattern']}")
            return f"{value!r} is not {meaning}"
        case "greater_than_equal":
            return f"{value} is too small; the minimum is {context['ge']}"
        case "less_than_equal":
            return f"{value} is too large; the maximum is {context['le']}"
        case "int_type" if detail["loc"][-1] == "int":
            return f'{value!r} is not a quantity such as 4, "500m" or "16Gi"'
        case "int_type" | "int_parsing" | "int_from_float":
            return f"{value!r} is not a whole number"
        case "dict_type" | "model_type" | "mapping_type":
            return "must be a mapping of fields"
        case "list_type":
            return "must be a list"
        case "not_the_number":
            return detail["msg"]
        case _:
            return detail["msg"][:1].lower() + detail["msg"][1:]


def _unknown_field(location: tuple[int | str, ...]) -> str:
    known = _fields_at(location[:-1])
    nearest = difflib.get_close_matches(str(location[-1]), known, n=3, cutoff=0.5)
    return "unknown field; " + (f"nearest: {', '.join(nearest)}" if nearest else f"known: {', '.join(known)}")


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    model: type[ApiModel] = TPUTrainingJob
    for part in location:
        if isinstance(part, int):
            continue
        annotation = next(f.annotation for n, f in model.model_fields.items() if (f.alias or n) == part)
        model = next(models_in(annotation))
    return [field.alias or name for name, field in model.model_fields.items()]
