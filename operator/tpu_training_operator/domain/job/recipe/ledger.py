"""What the scaling rules have in common: a record of what they did, and exact decimal arithmetic."""

from dataclasses import dataclass, field
from decimal import Context, Decimal
from fractions import Fraction
from typing import NamedTuple

from tpu_training_operator.api.decimals import readable


class Note(NamedTuple):
    """How the number in `field` was derived."""

    field: str
    rule: str

    def __str__(self) -> str:
        return f"{self.field}: {self.rule}"


@dataclass
class Ledger:
    """The rules add a note for each number they derive, and a warning for each that deserves a second look."""

    notes: list[Note] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def note(self, field: str, rule: str) -> None:
        self.notes.append(Note(field, rule))

    def warn(self, text: str) -> None:
        self.warnings.append(text)


# Decimal and not float: what a user writes as "0.1" stays 0.1.
TEN_DIGITS = Context(prec=10)


def decimal(ratio: Fraction) -> Decimal:
    return TEN_DIGITS.divide(Decimal(ratio.numerator), Decimal(ratio.denominator))


def plain(number: Decimal) -> str:
    """Returns the number without trailing zeros, for example 0.0004 or 8e-12."""
    return readable(str(number))
