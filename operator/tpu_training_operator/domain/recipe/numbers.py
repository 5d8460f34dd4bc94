"""Exact decimal arithmetic for hyperparameters: what a user writes as "0.1" stays 0.1."""

from decimal import Context, Decimal
from fractions import Fraction

TEN_DIGITS = Context(prec=10)


def decimal(ratio: Fraction) -> Decimal:
    return TEN_DIGITS.divide(Decimal(ratio.numerator), Decimal(ratio.denominator))


def plain(number: Decimal) -> str:
    """The number without exponent or trailing zeros: 0.0004."""
    return format(number.normalize(), "f")
