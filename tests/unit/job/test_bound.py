"""What a step takes at best, against arithmetic by hand."""

from typing import Any

import pytest

from tpu_training_operator.api.catalogue import Shape, generations, shapes_of_topology
from tpu_training_operator.domain.job.recipe.bound import bound_of
from tpu_training_operator.domain.job.trainer_report import StepCost

V5E = generations()["v5e"]  # 197 TFLOP/s, 819 GB/s, 200 GB/s

TRILLION, BILLION = 10**12, 10**9


def shape(topology: str, generation: str = "v5e") -> Shape:
    return shapes_of_topology(generation, topology)[0]


def cost(flops: float, model_flops: float, traffic: float, exchanged: dict[str, float], **more: Any) -> StepCost:
    return StepCost(flops=flops, model_flops=model_flops, traffic=traffic, exchanged=exchanged, **more)


def test_each_part_takes_its_time_at_its_peak() -> None:
    step = cost(394 * TRILLION, 197 * TRILLION, 819 * BILLION, {"all-reduce": 256 * BILLION})
    bound = bound_of(step, V5E, shape("16x16"))
    assert bound.arithmetic == pytest.approx(2.0)
    assert bound.memory == pytest.approx(1.0)
    # Twice (N - 1) / N of it.
    assert bound.network == pytest.approx(2.55)
    assert (bound.seconds, bound.by) == (pytest.approx(2.55), "exchange")
    assert bound.serial == pytest.approx(2.0 + 1.0 + 2.55)
    # Half of the operations are the model's.
    assert bound.utilisation == pytest.approx(1 / 2.55)
    assert bound.intensity == pytest.approx(394e12 / 819e9)
    assert bound.balance == pytest.approx(197e12 / 819e9)


def test_an_exchange_that_the_schedule_waits_for_adds_to_the_rest() -> None:
    exchanged = {"all-reduce": 256 * BILLION, "all-gather": BILLION}
    waits = {"waited": {"all-reduce": 256 * BILLION}, "waited_traffic": 819 * BILLION}
    bound = bound_of(cost(0, 0, 3 * 819 * BILLION, exchanged, **waits), V5E, shape("16x16"))
    assert (bound.network, bound.waiting) == (pytest.approx(2.55 + 255 / 200), pytest.approx(2.55))
    # A third of the traffic is the sum's own, and takes place meanwhile.
    assert bound.memory == pytest.approx(2.0)
    assert bound.seconds == pytest.approx(2.0 + 2.55)


def test_the_model_needs_no_fewer_operations_than_are_compiled() -> None:
    """XLA leaves out products with padding, and counts a loop once."""
    bound = bound_of(cost(100 * TRILLION, 197 * TRILLION, 0, {}), V5E, shape("1x1"))
    assert (bound.seconds, bound.utilisation) == (pytest.approx(1.0), pytest.approx(1.0))


@pytest.mark.parametrize(
    ("kind", "times"), [("all-reduce", 1.5), ("reduce-scatter", 0.75), ("all-gather", 3), ("collective-permute", 1)]
)
def test_a_replica_sends_what_every_algorithm_must(kind: str, times: float) -> None:
    # Two of a chip's four links lead to another chip of 2x2.
    bound = bound_of(cost(0, 0, 0, {kind: 100 * BILLION}), V5E, shape("2x2"))
    assert bound.network == pytest.approx(times)
    assert bound.by == "exchange"


@pytest.mark.parametrize(
    ("generation", "topology", "links"),
    [
        ("v5e", "2x2", 2 / 4),
        ("v5e", "4x4", 3 / 4),
        ("v5e", "8x8", 3.5 / 4),
        ("v5e", "8x16", (1.75 + 2) / 4),
        ("v6e", "16x16", 1),
        ("v4", "2x2x1", 2 / 6),
        ("v5p", "2x2x2", 3 / 6),
        ("v5p", "2x2x4", (1 + 1 + 1.5) / 6),
        ("v4", "4x4x4", 1),
        ("tpu7x", "4x4x8", 1),
        # The devices of one chip.
        ("v5e", "1x1", 1),
    ],
)
def test_a_slice_without_wrap_around_uses_some_of_its_chips_links(generation: str, topology: str, links: float) -> None:
    assert shape(topology, generation).links == pytest.approx(links)


def test_slices_send_each_their_sum_over_the_data_center_network() -> None:
    gradients = {"all-reduce": 256 * BILLION}
    one, four = (bound_of(cost(0, 0, 0, gradients, waited=gradients), V5E, shape("16x16"), count) for count in (1, 4))
    # Of 256 GB a slice of four sends 1.5 times as much, over 256 chips with 25 Gbit/s each.
    assert four.network - one.network == pytest.approx(1.5 * 256 / (256 * 25 / 8))
    assert four.waiting == pytest.approx(four.network)


def test_a_network_whose_speed_is_not_published_counts_as_nothing() -> None:
    v4 = generations()["v4"]
    assert bound_of(cost(0, 0, 0, {"all-reduce": BILLION}), v4, shape("4x4x4", "v4"), 2) == bound_of(
        cost(0, 0, 0, {"all-reduce": BILLION}), v4, shape("4x4x4", "v4")
    )


def test_two_devices_of_a_chip_share_its_peaks() -> None:
    step = cost(46 * TRILLION, 46 * TRILLION, 700 * BILLION, {})
    bound = bound_of(step, generations()["v2"], shape("2x2", "v2"))
    assert (bound.arithmetic, bound.memory) == (pytest.approx(2.0), pytest.approx(2.0))


def test_a_single_replica_exchanges_nothing_and_a_step_of_nothing_takes_no_time() -> None:
    bound = bound_of(cost(0, 0, 0, {"all-reduce": 1}), V5E, shape("1x1"))
    assert (bound.seconds, bound.utilisation, bound.intensity) == (0, 0, 0)


def test_every_generation_has_peaks() -> None:
    for generation in generations().values():
        assert generation.bf16_tflops_per_chip > 0
        assert generation.ici_gb_per_second_per_chip < generation.hbm_gb_per_second_per_chip
