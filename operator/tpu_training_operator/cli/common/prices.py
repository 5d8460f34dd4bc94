"""What chip-hours cost, by the user's own table: prices differ by contract, region and month, so none are built in."""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import click
import yaml

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.validation import Problem
from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.yaml_text import load, read_text
from tpu_training_operator.domain.plan.common.slice_record import PLACEHOLDERS

_HOUR = 3600
_EXAMPLE = "such as {currency: EUR, perChipHour: {v5e: 1.20, v5litepod-16: 1.10}}"


@dataclass(frozen=True)
class Prices:
    """`per_chip_hour`: by accelerator type, or by generation for all types without a price of their own."""

    currency: str
    per_chip_hour: dict[str, Decimal]

    def cost(self, chip_hours: str | None, status: Status) -> str | None:
        """What so many chip-hours of the job cost; None if they are unknown, or the table has no price for some of
        them. Those of earlier slices have their own price. All others have that of the present slice; so do
        placeholders, because no status says on which slice they were."""
        if chip_hours is None or status.resolved is None or self.unpriced_slices(status):
            return None
        earlier = {name: Decimal(seconds) / _HOUR for name, seconds in _earlier_slices(status).items()}
        here = Decimal(chip_hours) - sum(earlier.values())
        parts = {**earlier, status.resolved.accelerator_type: here}
        total = sum(hours * (self._price_of(name) or 0) for name, hours in parts.items())
        return f"{total:.2f} {self.currency}".strip()

    def unpriced_slices(self, status: Status) -> list[str]:
        """The slices of the job that the table has no price for."""
        here = [status.resolved.accelerator_type] if status.resolved else []
        return [name for name in (*_earlier_slices(status), *here) if self._price_of(name) is None]

    def _price_of(self, name: str) -> Decimal | None:
        """On the slice that a status calls by this name, such as 2 x v5litepod-16 (spot)."""
        accelerator_type = name.rpartition(" x ")[2].partition(" (")[0]
        prefix = accelerator_type.rpartition("-")[0]
        generation = next((one.name for one in generations().values() if one.name_prefix == prefix), prefix)
        return self.per_chip_hour.get(accelerator_type, self.per_chip_hour.get(generation))


def _earlier_slices(status: Status) -> dict[str, int]:
    """The chip-seconds of the slices that the job has left, by their names."""
    placement = status.placement
    if placement is None:
        return {}
    return {
        name: spent for name, spent in placement.chip_seconds.items() if name not in (placement.slice, PLACEHOLDERS)
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


def _price(path: Path, name: Any, given: Any) -> Decimal:
    try:
        price = Decimal(str(given))
    except InvalidOperation:
        price = Decimal(-1)
    if isinstance(given, bool) or not price.is_finite() or price < 0:
        message = f"{given!r} is not a price, which is a number of 0 or more"
        raise BadInput(path, [Problem(f"perChipHour.{name}", message)])
    return price


prices_option = click.option(
    "--prices",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Table of prices per chip-hour (YAML), to show what the job costs.",
)
