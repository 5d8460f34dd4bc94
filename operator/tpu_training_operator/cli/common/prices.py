"""Computes costs from the user's table of prices; they differ by contract, region and month, so none are built in."""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import click
import yaml

from tpu_training_operator.api.catalogue import generation_of, type_of
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.common.errors import BadInput, CommandError
from tpu_training_operator.cli.common.yaml_text import load, read_text
from tpu_training_operator.domain.plan.common.accounts import PLACEHOLDERS

_HOUR = 3600
_EXAMPLE = "such as {currency: EUR, perChipHour: {v5e: 1.20, v5litepod-16: 1.10}}"


@dataclass(frozen=True)
class Prices:
    """`per_chip_hour`: prices by accelerator type, or by generation for all types that are not listed."""

    currency: str
    per_chip_hour: dict[str, Decimal]

    def cost(self, chip_hours: str | None, status: Status) -> str | None:
        """Returns the cost of the job's chip-hours; None if they are unknown, or the table lacks a price for some.

        Hours on earlier slices have the price of their slice. All others, and those of placeholders, whose slice the
        status does not have, have the price of the present slice.
        """
        if chip_hours is None or status.resolved is None or self.unpriced_slices(status):
            return None
        earlier = {name: Decimal(seconds) / _HOUR for name, seconds in _earlier_slices(status).items()}
        here = Decimal(chip_hours) - sum(earlier.values())
        parts = {**earlier, status.resolved.accelerator_type: here}
        total = sum(hours * (self._price_of(name) or 0) for name, hours in parts.items())
        return self.text(total)

    def money(self, slice_name: str, chip_hours: float | None) -> Decimal | None:
        """Returns what chip-hours on a slice cost; None if they are unknown. Raises CommandError without a price."""
        if chip_hours is None:
            return None
        if (price := self._price_of(slice_name)) is None:
            known = f"{generation_of(slice_name)} or {type_of(slice_name)}"
            raise CommandError(f"--prices: the table has no price for {slice_name}; add {known} to perChipHour")
        return price * Decimal(chip_hours)

    def text(self, money: Decimal | float) -> str:
        return f"{money:.2f} {self.currency}".strip()

    def unpriced_slices(self, status: Status) -> list[str]:
        """Returns the slices of the job for which the table has no price."""
        here = [status.resolved.accelerator_type] if status.resolved else []
        return [name for name in (*_earlier_slices(status), *here) if self._price_of(name) is None]

    def _price_of(self, name: str) -> Decimal | None:
        """Returns the price for a slice's name in a status, such as 2 x v5litepod-16 (spot)."""
        return self.per_chip_hour.get(type_of(name), self.per_chip_hour.get(generation_of(name)))


def _earlier_slices(status: Status) -> dict[str, int]:
    """Returns the chip-seconds on slices that the job has left, by the slices' names."""
    placement = status.placement
    if placement is None:
        return {}
    return {
        name: seconds for name, seconds in placement.chip_seconds.items() if name not in (placement.slice, PLACEHOLDERS)
    }


def load_prices(path: Path) -> Prices:
    try:
        body = load(read_text(path))
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(path, [Problem("", f"cannot be read: {' '.join(str(error).split())}")]) from None
    table = body.get("perChipHour") if isinstance(body, dict) else None
    if not isinstance(table, dict) or not table or body.keys() - {"currency", "perChipHour"}:
        raise BadInput(path, [Problem("", f"a table of prices has perChipHour, and perhaps currency, {_EXAMPLE}")])
    return Prices(
        str(body.get("currency") or ""), {str(name): _price(path, name, price) for name, price in table.items()}
    )


def _price(path: Path, name: Any, value: Any) -> Decimal:
    try:
        price = Decimal(str(value))
    except InvalidOperation:
        price = Decimal(-1)
    if isinstance(value, bool) or not price.is_finite() or price < 0:
        message = f"{value!r} is not a price; a price is a number of 0 or more"
        raise BadInput(path, [Problem(f"perChipHour.{name}", message)])
    return price


prices_option = click.option(
    "--prices",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Table of prices per chip-hour (YAML), to show what the job costs.",
)
