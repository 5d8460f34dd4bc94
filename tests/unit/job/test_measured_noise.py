"""The noise scale of a training, from what was measured in its steps."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_contract.noise_scale import NoiseScale, Window, estimate, measured_noise
from tpu_training_operator.domain.job.recipe.noise_scale import best_multiplier

BATCH = 32


def windows(scales: list[float], lengths: float = 1.0) -> list[Window]:
    """Ten steps for each noise scale, with gradients of that squared length."""
    return [Window(10, 10 * scale * lengths, 10 * lengths) for scale in scales]


@given(scale=st.floats(1e-3, 1e6), length=st.floats(1e-9, 1e9))
def test_a_constant_noise_scale_is_found_exactly(scale: float, length: float) -> None:
    found = estimate(windows([scale] * 30, length), BATCH)
    assert found is not None
    assert found.value == pytest.approx(scale)
    assert found.error == pytest.approx(0, abs=1e-6 * scale)


@given(st.lists(st.floats(1, 1e5), min_size=5, max_size=40), st.sampled_from([32, 64, 512, 4096]))
def test_it_predicts_the_steps_of_a_training_whose_noise_grows(scales: list[float], batch: int) -> None:
    """The progress that was made with the tuned batch takes 1 + Bn/B' steps of the larger one at each moment."""
    found = estimate(windows(scales), BATCH)
    if found is None:
        return
    steps = sum(10 * (1 + scale / batch) / (1 + scale / BATCH) for scale in scales)
    times = 1 / float(best_multiplier(Fraction(found.value), BATCH, batch))
    assert times == pytest.approx(steps / (10 * len(scales)))


@pytest.mark.parametrize("seed", range(20))
def test_the_truth_lies_within_a_few_standard_errors(seed: int) -> None:
    drawn = random.Random(seed)
    noisy = [Window(10, drawn.gauss(4000, 400), drawn.gauss(10, 5)) for _ in range(120)]
    found = measured_noise(noisy, BATCH)
    assert found is not None
    assert abs(found.whole.value - 400) < 4 * found.whole.error
    assert found.whole.error < 100
    thirds = [part for part in (found.start, found.middle, found.end) if part is not None]
    assert all(abs(part.value - 400) < 4 * part.error for part in thirds)


def test_the_thirds_are_those_of_the_training() -> None:
    found = measured_noise(windows([20.0] * 40 + [100.0] * 40 + [500.0] * 40), BATCH)
    assert found is not None
    thirds = [part.value for part in (found.start, found.middle, found.end) if part is not None]
    assert thirds == pytest.approx([20, 100, 500])
    assert 20 < found.whole.value < 500


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([], id="nothing was measured"),
        pytest.param(windows([400.0] * 4), id="too few steps"),
        pytest.param([Window(10, 100.0, sign) for sign in (1.0, -1.0) * 15], id="no gradient stands out of the noise"),
        pytest.param([Window(10, 0.0, 0.0)] * 30, id="no gradient at all"),
    ],
)
def test_it_is_not_told_where_it_cannot_be(steps: list[Window]) -> None:
    assert measured_noise(steps, BATCH) is None


@pytest.mark.parametrize(("value", "text"), [(419.6, "420"), (0.0471, "0.0471"), (123456.0, "123000"), (0.0, "0")])
def test_the_text_is_a_plain_number_of_three_digits(value: float, text: str) -> None:
    assert NoiseScale(value, 1.0).text == text
