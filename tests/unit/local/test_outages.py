"""`tpujob run --simulate-loss`: which slices are lost, and when."""

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.unit.jobs import job
from tpu_training_operator.domain.job.options import options_of
from tpu_training_operator.local.outages import parse_outage

OPTIONS = options_of(
    job(
        {
            "spec.slice": {"acceleratorType": "v5p-8", "count": 4, "hardware": "CPU"},
            "spec.placement": {
                "count": {"min": 1},
                "alternatives": [{"slice": {"acceleratorType": "v5litepod-16", "count": 2, "hardware": "CPU"}}],
            },
            "spec.recipe.globalBatchSize": 1024,
        }
    )
)
OWN = frozenset(option.number for option in OPTIONS if option.is_own)
OTHER = frozenset(option.number for option in OPTIONS if not option.is_own)


@pytest.mark.parametrize(
    ("text", "numbers", "left", "begins", "ends"),
    [
        ("v5p-8:5-9", OWN, 3, 5, 9),
        ("1 x v5p-8:0-", OWN, 3, 0, float("inf")),
        ("4 x v5p-8:5-9", OWN, 0, 5, 9),
        ("2 x v5litepod-16:5-9", OTHER, 0, 5, 9),
    ],
)
def test_slices_that_are_lost(text: str, numbers: frozenset[int], left: int, begins: float, ends: float) -> None:
    outage = parse_outage(text, OPTIONS)
    assert (outage.numbers, outage.left, outage.begins, outage.ends) == (numbers, left, begins, ends)


@pytest.mark.parametrize(
    "text",
    [
        "v5p-8",
        "v5p-8:5",
        "v5p-8:-5",
        "v5p-8:٥-٩",
        "v5p-8:9-5",
        "v5p-8:5-5",
        "v5p-16:5-9",
        "5 x v5p-8:5-9",
        "0 x v5p-8:5-9",
        "² x v5p-8:5-9",
        "a few x v5p-8:5-9",
        "1 x v5litepod-16:5-9",
    ],
)
def test_what_cannot_be_lost_is_refused(text: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ValueError) as caught:
        parse_outage(text, OPTIONS)
    assert str(caught.value) == snapshot
