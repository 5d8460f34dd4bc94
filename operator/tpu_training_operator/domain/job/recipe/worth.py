"""Which of several slices is worth its chips: the fastest, the cheapest, and the largest that still pays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FASTEST, CHEAPEST, LARGEST = "fastest", "cheapest", "largest that pays"

MOST_LOST = 0.2
"""A slice pays if a smaller share of its chip-hours is lost against the smallest slice. A judgement."""

# Expenses within a percent are the same: steps are whole, and epochs drop their last examples.
_SAME = 1.01


@dataclass(frozen=True)
class Offer:
    """A training on one slice. `money`: what it costs; None if that is not known."""

    generation: str
    chips: int
    hours: float
    money: float | None = None

    @property
    def chip_hours(self) -> float:
        return self.chips * self.hours

    def lost(self, offers: Sequence["Offer"]) -> float:
        """Returns the share of the chip-hours that the smallest slice of the generation does not need."""
        smallest = min((offer for offer in offers if offer.generation == self.generation), key=lambda o: o.chips)
        return max(0.0, 1 - smallest.chip_hours / self.chip_hours)


def marks(offers: Sequence[Offer]) -> Iterator[tuple[Offer, str]]:
    """Yields the offers that are best at something, and at what. A single slice is not the best of any."""
    if len(offers) < 2:
        return
    yield _fastest(offers), FASTEST
    if cheap := _cheapest(offers):
        yield _fastest(cheap), CHEAPEST
    for generation in dict.fromkeys(offer.generation for offer in offers):
        alike = [offer for offer in offers if offer.generation == generation]
        if len(alike) > 1:
            yield max((o for o in alike if o.lost(alike) < MOST_LOST), key=lambda o: (o.chips, -o.hours)), LARGEST


def _fastest(offers: Sequence[Offer]) -> Offer:
    return min(offers, key=lambda offer: (offer.hours, offer.chips))


def _cheapest(offers: Sequence[Offer]) -> list[Offer]:
    """Returns the offers that cost the least money. Where that is not known, chip-hours count, but those of two
    generations cannot be compared."""
    if any(offer.money is None for offer in offers) and len({offer.generation for offer in offers}) > 1:
        return []
    expenses = [offer.chip_hours if offer.money is None else offer.money for offer in offers]
    return [offer for offer, expense in zip(offers, expenses, strict=True) if expense <= min(expenses) * _SAME]
