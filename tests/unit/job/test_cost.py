"""What a training costs: hand-calculated hours, and what must hold on any slices."""

from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.jobs import job_body
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.recipe.cost import StepTime, cost_of, cost_rows, times_in, to_same_loss
from tpu_training_operator.domain.job.recipe.resolve import Resolution, resolve

SIZES = [1, 4, 8, 16, 32, 64, 128, 256]


def on(accelerator_type: str, **recipe: Any) -> Resolution:
    """The job, tuned on v5litepod-16, on another slice."""
    changes = {"tunedOn": {"acceleratorType": "v5litepod-16"}, "globalBatchSize": 2048, **recipe}
    body = job_body({f"spec.recipe.{name}": value for name, value in changes.items()})
    body["spec"]["slice"] = {"acceleratorType": accelerator_type}
    return resolve(parse_job(body).spec)


def measured(seconds: float, resolution: Resolution) -> StepTime:
    return StepTime.of(resolution, seconds, "measured on")


# 100,000 steps of 2048 examples on 16 chips at 0.36 s: 10 hours, 160 chip-hours.
@pytest.mark.parametrize(
    ("batch", "name", "steps", "seconds", "hours", "chip_hours"),
    [
        ("PerCoreConstant", "v5litepod-4", 400_000, 0.36, 40, 160),
        ("PerCoreConstant", "v5litepod-16", 100_000, 0.36, 10, 160),
        ("PerCoreConstant", "v5litepod-64", 25_000, 0.36, 2.5, 160),
        # Four passes of 128 for one of 128; then a pass of 32.
        ("GlobalConstant", "v5litepod-4", 100_000, 1.44, 40, 160),
        ("GlobalConstant", "v5litepod-16", 100_000, 0.36, 10, 160),
        ("GlobalConstant", "v5litepod-64", 100_000, 0.09, 2.5, 160),
    ],
)
def test_the_cost_by_hand(batch: str, name: str, steps: int, seconds: float, hours: float, chip_hours: float) -> None:
    recipe = {"trainSteps": 100_000, "scaling": {"batch": batch}}
    cost = cost_of(on(name, **recipe), [measured(0.36, on("v5litepod-16", **recipe))])
    assert cost.steps == steps
    found = (cost.step_seconds, cost.hours, cost.chip_hours)
    assert found == tuple(pytest.approx(number) for number in (seconds, hours, chip_hours))


def test_adascale_costs_at_least_what_k_times_fewer_steps_do() -> None:
    recipe = {"trainSteps": 100_000, "scaling": {"learningRate": "AdaScale"}}
    wide, same = (on(name, **recipe) for name in ("v5litepod-64", "v5litepod-16"))
    times = [measured(0.36, same)]
    rows = cost_rows([cost_of(wide, times), cost_of(same, times)])
    assert rows == {
        "seconds per step": ["0.36", "0.36"],
        "hours": ["2.5 to 10", "10"],
        "chip-hours": ["160 to 640", "160"],
    }
    assert cost_rows([cost_of(wide)]) == {"chip-steps": ["1600000 to 6400000"]}


@given(
    measured_on=st.sampled_from(SIZES),
    seconds=st.floats(1e-3, 100),
    steps=st.integers(1, 1000),
    batch=st.sampled_from(["PerCoreConstant", "GlobalConstant"]),
)
def test_chip_hours_do_not_depend_on_the_slice_and_hours_fall_with_its_size(
    measured_on: int, seconds: float, steps: int, batch: str
) -> None:
    recipe = {"trainSteps": steps * SIZES[-1], "scaling": {"batch": batch}}
    time = measured(seconds, on(f"v5litepod-{measured_on}", **recipe))
    costs = [cost_of(on(f"v5litepod-{size}", **recipe), [time]) for size in SIZES]
    for small, large in pairwise(costs):
        assert small.chip_hours == pytest.approx(large.chip_hours)
        assert small.hours == pytest.approx(large.hours * large.chips / small.chips)


def test_of_several_measurements_the_nearest_slice_of_the_generation_counts() -> None:
    times = [
        measured(seconds, on(name)) for name, seconds in {"v5litepod-4": 1, "v5litepod-64": 2, "v6e-16": 9}.items()
    ]
    found = {name: cost_of(on(name), times).step_seconds for name in ("v5litepod-8", "v5litepod-64", "v6e-4", "v4-8")}
    assert found == {"v5litepod-8": 1, "v5litepod-64": 2, "v6e-4": 9, "v4-8": None}


def test_without_a_measurement_on_the_generation_only_chip_steps_are_known() -> None:
    cost = cost_of(on("v6e-16"), [measured(1, on("v5litepod-16"))])
    assert (cost.hours, cost.chip_hours, cost.as_json()) == (
        None,
        None,
        {"steps": 300, "examples": 300 * 2048, "chipSteps": 300 * 16},
    )


def rung(name: str, batch: int, speed: str | None, chips: int = 4) -> dict[str, Any]:
    numbers = {"chips": chips, "replicas": chips, "globalBatchSize": batch, "learningRate": 0.1, "steps": 20}
    return {"slice": name, "verdict": "Passed", "examplesPerSecond": speed, **numbers}


def test_a_status_tells_the_times_of_the_job_and_of_its_rungs() -> None:
    body = {
        "resolved": on("v5litepod-64").resolved.as_json(),
        "progress": {"step": 7, "totalSteps": 300, "examplesPerSecond": "4096"},
        "ladder": {
            "rung": 3,
            "of": 3,
            "rungs": [rung("v5litepod-4", 512, "256"), rung("v5litepod-8 (spot)", 128, "64", chips=8)],
        },
    }
    found = [(time.slice, time.seconds, time.examples) for time in times_in(Status.read(body), "digits")]
    assert found == [("v5litepod-64", 2, 128), ("v5litepod-4", 2, 128), ("v5litepod-8 (spot)", 2, 16)]
    # 128 examples for a replica, where the rung had 16.
    assert cost_of(on("v5litepod-8"), [*times_in(Status.read(body), "digits")]).step_seconds == 16


@pytest.mark.parametrize("speed", [None, "0", "-1", "nan", "inf", "fast"])
def test_a_status_without_a_speed_tells_no_time(speed: str | None) -> None:
    rungs = {"ladder": {"rung": 1, "of": 2, "rungs": [rung("v5litepod-4", 512, speed), rung("v5e", 1, "1", chips=0)]}}
    assert list(times_in(Status.read(rungs), "digits")) == []


# McCandlish et al. 2018: examples in proportion to 1 + B / 4000, so 1.128 at 512, 1.512 at 2048 and 3.048 at 8192.
@pytest.mark.parametrize(
    ("name", "steps"),
    [("v5litepod-4", ceil(1200 * 1.128 / 1.512)), ("v5litepod-16", 300), ("v5litepod-64", ceil(75 * 3.048 / 1.512))],
)
def test_the_steps_to_the_same_loss(name: str, steps: int) -> None:
    resolution = on(name)
    recipe = parse_job(job_body({"spec.recipe.globalBatchSize": 2048, "spec.recipe.gradientNoiseScale": 4000})).spec
    cost = to_same_loss(cost_of(resolution), recipe.recipe)
    assert cost is not None
    assert cost.steps == steps
