"""The derived numbers: utilisation against the peak, and the gradient noise scale."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer import tasks
from tests.trainer.gang_processes import Launcher, run_spec
from tests.trainer.whole_runs import run
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.reporting.throughput import NOISE_STEPS, TERAFLOPS, FlopCounter, NoiseMeter, Utilisation, mfu


@pytest.mark.parametrize(
    ("generation", "replicas", "expected"),
    [
        pytest.param("v5e", 1, 1.0, id="one chip at its peak"),
        pytest.param("v5e", 4, 0.25, id="four chips that do the work of one"),
        pytest.param("v4", 1, 197 / 275, id="megacore: one device has the whole chip"),
        pytest.param("v3", 2, 197 / 123, id="two devices of a v3 make one chip"),
        pytest.param("tpu7x", 2, 197 / 2307, id="two devices of a tpu7x make one chip"),
        pytest.param("cpu", 1, None, id="no known peak"),
    ],
)
def test_utilisation_is_the_share_of_the_peak_of_all_replicas(
    generation: str, replicas: int, expected: float | None
) -> None:
    assert mfu(2 * 197e12, replicas, step_seconds=2.0, generation=generation) == pytest.approx(expected)


@pytest.mark.parametrize(("flops", "seconds"), [(0, 1.0), (1e12, 0.0)])
def test_where_nothing_was_measured_there_is_no_utilisation(flops: float, seconds: float) -> None:
    assert mfu(flops, 1, seconds, "v5e") is None


def test_every_generation_has_a_peak_and_newer_ones_of_a_line_have_more() -> None:
    assert TERAFLOPS["v2"] < TERAFLOPS["v3"] < TERAFLOPS["v4"] < TERAFLOPS["v5p"] < TERAFLOPS["tpu7x"]
    assert TERAFLOPS["v5e"] < TERAFLOPS["v6e"]


def test_the_operations_of_a_linear_layer_are_those_of_three_matrix_products() -> None:
    layer, rows = torch.nn.Linear(20, 30), torch.ones(8, 20, requires_grad=True)
    with FlopCounter() as counted:
        layer(rows).sum().backward()
    assert counted.flops == 3 * 2 * 8 * 20 * 30


def test_only_the_first_step_of_a_tpu_run_is_counted_and_all_processes_add_up() -> None:
    spec = parse_run_spec(run_spec(hosts=1, replicas=8, backend="xla", hardware="TPU"))
    utilisation = Utilisation(spec, terms=8)
    for _ in range(3):
        with utilisation.counting():
            torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    assert utilisation.of(0.5) == pytest.approx(2e9 / (197e12 * 0.5))
    assert utilisation.of(None) is None


def test_of_replicas_in_one_process_only_the_reporter_counts() -> None:
    """Two that count at once may meet an operation first together, which PyTorch 2.9 asserts to be impossible."""

    class Modes(tasks.Network):
        """Notes how many dispatch modes each of its passes runs under."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(torch._C._len_torch_dispatch_stack())
            return super().forward(x)

    ran = run(lambda hp, _: replace(tasks.small(hp), model=Modes()), 2, backend="xla", hardware="TPU", trainSteps=3)
    assert [model.seen for model in ran.models] == [[1, 0, 0], [0, 0, 0]]


def test_on_cpu_nothing_is_counted() -> None:
    utilisation = Utilisation(parse_run_spec(run_spec()), terms=8)
    with utilisation.counting():
        torch.ones(10, 10) @ torch.ones(10, 10)
    assert utilisation.of(0.5) is None


def test_counting_leaves_the_traced_graph_and_the_compilations_as_they_are(launcher: Launcher) -> None:
    said = launcher.run_on_xla("tests.trainer.counting_flops")
    plain, counted = (line.split() for line in said.splitlines() if line.startswith("graphs"))
    assert counted == plain


@settings(max_examples=10)
@given(
    replicas=st.sampled_from([2, 8]),
    batch=st.sampled_from([1, 16]),
    ratio=st.sampled_from([0.2, 1.0, 5.0]),
    seed=st.integers(0, 2**20),
)
def test_gradients_with_a_known_noise_have_that_noise_scale(replicas: int, batch: int, ratio: float, seed: int) -> None:
    """The gradient of an example is g + noise with |g| = 1 and E|noise|^2 = the scale, here `ratio` global batches."""
    generator = torch.Generator().manual_seed(seed)
    dimensions, scale = 1000, ratio * batch * replicas
    gradient = torch.full((dimensions,), dimensions**-0.5)
    estimate = NoiseMeter(batch, batch * replicas)
    for _ in range(150):
        # A replica's batch has the noise of one example over the batch, so that is what is drawn.
        noise = torch.randn(replicas, dimensions, generator=generator) * math.sqrt(scale / dimensions / batch)
        own = gradient + noise
        estimate.add(float(own.square().sum(1).mean()), float(own.mean(0).square().sum()))
    assert estimate.value == pytest.approx(scale, rel=0.25)


def test_one_replica_has_no_noise_scale() -> None:
    estimate = NoiseMeter(16, 16)
    for _ in range(2 * NOISE_STEPS):
        estimate.add(2.0, 2.0)
    assert estimate.value is None


def test_there_is_no_number_before_there_are_enough_steps() -> None:
    estimate = NoiseMeter(8, 32)
    known = []
    for _ in range(NOISE_STEPS):
        known.append(estimate.value)
        estimate.add(2.0, 1.0)
    assert known == [None] * NOISE_STEPS
    # |G|^2 = (32 - 16) / 24 and S = 1 / (1/8 - 1/32).
    assert estimate.value == pytest.approx((32 / 3) / (2 / 3))


def test_a_gradient_that_is_all_noise_has_no_number_and_one_without_noise_has_0() -> None:
    noisy, clean = NoiseMeter(8, 32), NoiseMeter(8, 32)
    for _ in range(NOISE_STEPS):
        noisy.add(4.0, 0.5)
        clean.add(1.0, 1.0)
    assert (noisy.value, clean.value) == (None, 0.0)


@pytest.mark.parametrize("broken", [(math.nan, 1.0), (math.inf, 1.0), (math.inf, math.inf)])
def test_a_step_with_a_broken_gradient_is_skipped(broken: tuple[float, float]) -> None:
    estimate = NoiseMeter(8, 32)
    for _ in range(NOISE_STEPS):
        estimate.add(2.0, 1.0)
        estimate.add(*broken)
    assert estimate.value == pytest.approx(16.0)
