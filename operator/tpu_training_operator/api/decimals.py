"""Numbers that need not be whole: JSON numbers in a job, decimal text in Python.

A number is read exactly as it is written: its text is the shortest that gives the same 64 bits again, which is what the
user wrote if that has at most 15 digits. The arithmetic on it is decimal, so 0.1 stays 0.1.

A file may also have the number as text ("0.1"). The API server refuses that; `tpujob` reads it with a hint and submits
the number.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal as Exact
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PlainSerializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tpu_training_operator.api.model import LARGEST_COUNT, ApiModel, models_in

_TEXT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,9})?")
_LONGEST = 1024
# The API server compares whole numbers, bounds included, as 64-bit integers.
_LARGEST = 10**18
_MOST_RATIO = 2
_PERCENT = 100
# Smaller numbers are written with an exponent.
_SMALLEST_PLAIN = 1e-12
_SMALLEST_READABLE = Exact("1e-6")


def number_in(text: str) -> int | float:
    """Returns the JSON number for a decimal text. Whole numbers are integers, as in the API server's answers."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= LARGEST_COUNT else value


def text_of(value: object) -> str | None:
    """Returns the decimal text of a finite number, or of a text that is one; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and (len(value) > _LONGEST or not _TEXT.fullmatch(value)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not math.isfinite(number):
        return None
    if number.is_integer() and abs(number) <= LARGEST_COUNT:
        return str(int(number))
    return format(Exact(repr(number)), "f") if _SMALLEST_PLAIN <= abs(number) < 1 / _SMALLEST_PLAIN else repr(number)


def readable(text: str) -> str:
    """Returns the decimal text as people read it: 0.0004, but 8e-12 below a millionth."""
    number = Exact(text).normalize()
    return f"{number:e}" if 0 < abs(number) < _SMALLEST_READABLE else format(number, "f")


@dataclass(frozen=True)
class _Number:
    """A number within bounds, which `meaning` describes for an error. An open bound excludes itself."""

    meaning: str
    least: int | None = None
    most: int | None = _LARGEST
    is_open_below: bool = False
    is_open_above: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        bounds: dict[str, Any] = {"minimum": self.least, "maximum": self.most}
        flags = {"exclusiveMinimum": self.is_open_below, "exclusiveMaximum": self.is_open_above}
        present = {name: bound for name, bound in bounds.items() if bound is not None}
        return {"type": "number", **present, **{name: True for name, is_open in flags.items() if is_open}}

    def _read(self, value: object) -> str:
        text = text_of(value)
        if text is None or not self._includes(float(text)):
            raise PydanticCustomError("not_the_number", "{reason}", {"reason": self._reason(value)})
        return text

    def _includes(self, number: float) -> bool:
        is_above = self.least is None or number > self.least or (number == self.least and not self.is_open_below)
        return is_above and (
            self.most is None or number < self.most or (number == self.most and not self.is_open_above)
        )

    def _reason(self, value: object) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value} is not finite; give {self.meaning}"
        if self.most == _LARGEST and (text := text_of(value)) and abs(float(text)) > _LARGEST:
            return f"{value!r:.60} is too large; the maximum is {_LARGEST:.0e}"
        what = "is empty; it must be" if value is None else f"{value!r:.60} is not"
        return f"{what} {self.meaning}{self._written(value)}"

    def _written(self, value: object) -> str:
        """Says how to write a percentage, or a number with a comma."""
        is_percent = isinstance(value, str) and value.endswith("%")
        number = text_of(value.rstrip(" %").replace(",", ".", 1) if isinstance(value, str) else value)
        if number is None or isinstance(value, bool):
            return ""
        is_large = self.most in (1, _MOST_RATIO) and self.most < float(number) <= _PERCENT
        meant = str(Exact(number) / _PERCENT) if is_percent or is_large else number
        percent = f"{readable(number)} % is " if is_percent or is_large else "write "
        return f"; {percent}{readable(meant)}" if is_percent or is_large or "," in str(value) else ""


POSITIVE = _Number("a number above 0 such as 0.1 or 3e-4", least=0, is_open_below=True)
NON_NEGATIVE = _Number("a number of 0 or more such as 0.01 or 1e-4", least=0)
SIGNED = _Number("a number such as 0.5 or -1e-4", least=-_LARGEST)
FRACTION = _Number("a number from 0 to below 1 such as 0.9", least=0, most=1, is_open_above=True)
RATIO = _Number(f"a fraction from 0 to {_MOST_RATIO} such as 0.8", least=0, most=_MOST_RATIO)

PositiveDecimal = Annotated[str, POSITIVE]
NonNegativeDecimal = Annotated[str, NON_NEGATIVE]
Decimal = Annotated[str, SIGNED]
# Momentum and the betas.
FractionDecimal = Annotated[str, FRACTION]
RatioDecimal = Annotated[str, RATIO]

# A number of the status that is derived from the spec. Scaling may take it beyond the spec's bounds.
ResolvedDecimal = Annotated[str, _Number("a number", most=None), PlainSerializer(number_in, when_used="json")]


def put_numbers_for_texts(model: type[ApiModel], body: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Replaces every text in the body that stands for a number. Yields the fields' paths and the texts."""
    if not isinstance(body, dict):
        return
    for name, field in model.model_fields.items():
        key = field.alias or name
        value, where = body.get(key), f"{path}.{key}" if path else key
        if isinstance(value, str) and _is_decimal(field.annotation, field.metadata) and text_of(value) is not None:
            body[key] = number_in(value)
            yield where, value
        for part in models_in(field.annotation):
            for index, item in enumerate(value) if isinstance(value, list) else ():
                yield from put_numbers_for_texts(part, item, f"{where}[{index}]")
            yield from put_numbers_for_texts(part, value, where)


def _is_decimal(annotation: Any, metadata: Any) -> bool:
    markers = [*metadata, *getattr(annotation, "__metadata__", ())]
    return any(isinstance(item, _Number) for item in markers) or any(
        _is_decimal(argument, ()) for argument in getattr(annotation, "__args__", ()) if argument is not annotation
    )
