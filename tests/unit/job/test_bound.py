"""What a step takes at best, against arithmetic by hand."""

import pytest

from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.domain.job.recipe.bound import bound_of
from tpu_training_operator.domain.job.trainer_report import StepCost

V5E = generations()["v5e"]  # 197 TFLOP/s, 819 GB/s, 200 GB/s

TRILLION, BILLION = 10**12, 10**9


def cost(flops: float, model_flops: float, traffic: float, exchanged: dict[str, float]) -> StepCost:
    return StepCost(flops=flops, model_flops=model_flops, traffic=traffic, exchanged=exchanged)


def test_each_part_takes_its_time_at_its_peak() -> None:
    step = cost(394 * TRILLION, 197 * TRILLION, 819 * BILLION, {"all-reduce": 100 * BILLION})
    bound = bound_of(step, V5E, replicas=2)
    assert bound.arithmetic == pytest.approx(2.0)
    assert bound.memory == pytest.approx(1.0)
    # Twice (N - 1) / N of it: with two replicas as much as there is.
    assert bound.network == pytest.approx(0.5)
    assert (bound.seconds, bound.by) == (pytest.approx(2.0), "arithmetic")
    # Half of the operations are the model's.
    assert bound.utilisation == pytest.approx(0.5)
    assert bound.intensity == pytest.approx(394e12 / 819e9)
    assert bound.balance == pytest.approx(197e12 / 819e9)


@pytest.mark.parametrize(
    ("kind", "times"), [("all-reduce", 1.5), ("reduce-scatter", 0.75), ("all-gather", 3), ("collective-permute", 1)]
)
def test_a_replica_sends_what_every_algorithm_must(kind: str, times: float) -> None:
    bound = bound_of(cost(0, 0, 0, {kind: 200 * BILLION}), V5E, replicas=4)
    assert bound.network == pytest.approx(times)
    assert bound.by == "exchange"


def test_two_devices_of_a_chip_share_its_peaks() -> None:
    step = cost(46 * TRILLION, 46 * TRILLION, 700 * BILLION, {})
    bound = bound_of(step, generations()["v2"], replicas=8)
    assert (bound.arithmetic, bound.memory) == (pytest.approx(2.0), pytest.approx(2.0))


def test_a_single_replica_exchanges_nothing_and_a_step_of_nothing_takes_no_time() -> None:
    bound = bound_of(cost(0, 0, 0, {"all-reduce": 1}), V5E, replicas=1)
    assert (bound.seconds, bound.utilisation, bound.intensity) == (0, 0, 0)


def test_every_generation_has_peaks() -> None:
    for generation in generations().values():
        assert generation.bf16_tflops_per_chip > 0
        assert generation.ici_gb_per_second_per_chip < generation.hbm_gb_per_second_per_chip
