"""Which slice is worth its chips, by hand and for any slices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_training_operator.domain.job.recipe.worth import CHEAPEST, FASTEST, LARGEST, MOST_LOST, Offer, marks


def by_chips(chip_hours: dict[int, float], generation: str = "v5e", price: float | None = None) -> list[Offer]:
    return [
        Offer(generation, chips, spent / chips, None if price is None else price * spent)
        for chips, spent in chip_hours.items()
    ]


def best(offers: list[Offer]) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {}
    for offer, mark in marks(offers):
        found.setdefault(mark, []).append((offer.generation, offer.chips))
    return found


@pytest.mark.parametrize(
    ("chip_hours", "fastest", "cheapest", "largest"),
    [
        # 100 of 124 are 19 % lost, 100 of 126 are 21 %.
        ({4: 100, 16: 110, 64: 124, 256: 300}, 256, 4, 64),
        ({4: 100, 16: 110, 64: 126, 256: 300}, 256, 4, 16),
        # Within a percent costs are the same, and the faster slice is the better one.
        ({4: 100, 16: 100.9, 64: 130}, 64, 16, 16),
        # Beyond some size a slice may even be slower.
        ({4: 100, 16: 500}, 4, 4, 4),
        # The order of the slices does not matter.
        ({64: 124, 4: 100, 16: 110}, 64, 4, 64),
    ],
)
def test_the_marks_by_hand(chip_hours: dict[int, float], fastest: int, cheapest: int, largest: int) -> None:
    expected = {FASTEST: fastest, CHEAPEST: cheapest, LARGEST: largest}
    assert best(by_chips(chip_hours)) == {mark: [("v5e", chips)] for mark, chips in expected.items()}


def test_generations_are_compared_in_hours_and_in_money_but_not_in_chip_hours() -> None:
    old, new = {4: 100.0, 16: 110.0}, {4: 50.0, 16: 70.0}
    found = best(by_chips(old) + by_chips(new, "v6e"))
    assert found == {FASTEST: [("v6e", 16)], LARGEST: [("v5e", 16), ("v6e", 4)]}
    dear = best(by_chips(old, price=1) + by_chips(new, "v6e", price=3))
    assert dear[CHEAPEST] == [("v5e", 4)]


def test_a_single_slice_is_not_the_best_of_any() -> None:
    assert best(by_chips({4: 100})) == {}


@given(st.dictionaries(st.integers(1, 10_000), st.floats(0.01, 1e6), min_size=2, max_size=8))
def test_every_mark_is_given_once_and_the_smallest_slice_always_pays(chip_hours: dict[int, float]) -> None:
    offers = by_chips(chip_hours)
    assert sorted(best(offers)) == sorted([FASTEST, CHEAPEST, LARGEST])
    assert min(offers, key=lambda offer: offer.chips).lost(offers) == 0
    (largest,) = (offer for offer, mark in marks(offers) if mark == LARGEST)
    assert largest.lost(offers) < MOST_LOST
    assert all(offer.lost(offers) >= MOST_LOST for offer in offers if offer.chips > largest.chips)
