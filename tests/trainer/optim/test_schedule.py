"""The learning rate of every step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.gang_processes import run_spec
from tpu_contract.run_spec import ScheduleName, ScheduleSpec, parse_run_spec
from tpu_trainer.optim.schedule import LearningRateSetter, Ramp, RecipeRate, rate_factor
from tpu_trainer.task.task import Hyperparameters

CONSTANT = ScheduleSpec("Constant", (), None)

CASES = [
    ("no warm-up", 0, CONSTANT, [1.0, 1.0, 1.0, 1.0]),
    ("warm-up rises linearly and does not begin at 0", 4, CONSTANT, [0.25, 0.5, 0.75, 1.0]),
    ("linear falls towards 0", 0, ScheduleSpec("Linear", (), None), [1.0, 0.75, 0.5, 0.25]),
    ("linear falls towards its factor", 0, ScheduleSpec("Linear", (), 0.2), [1.0, 0.8, 0.6, 0.4]),
    ("linear begins where warm-up ends", 2, ScheduleSpec("Linear", (), None), [0.5, 1.0, 1.0, 0.5]),
    ("cosine falls towards 0", 0, ScheduleSpec("Cosine", (), None), [1.0, 0.853553, 0.5, 0.146447]),
    ("cosine falls towards its factor", 0, ScheduleSpec("Cosine", (), 0.5), [1.0, 0.926777, 0.75, 0.573223]),
    ("step divides by ten at every milestone", 0, ScheduleSpec("Step", (1, 3), None), [1.0, 0.1, 0.1, 0.01]),
    ("step multiplies by its factor", 0, ScheduleSpec("Step", (2,), 0.5), [1.0, 1.0, 0.5, 0.5]),
]


@pytest.mark.parametrize(("warmup", "schedule", "expected"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_the_rate_of_the_first_four_steps(warmup: int, schedule: ScheduleSpec, expected: list[float]) -> None:
    assert [rate_factor(step, 4, warmup, schedule) for step in range(4)] == pytest.approx(expected, abs=1e-6)


@given(data=st.data(), steps=st.integers(1, 500), name=st.sampled_from(ScheduleName))
def test_the_rate_is_never_0_and_never_above_the_recipes(data: st.DataObject, steps: int, name: str) -> None:
    warmup, step = data.draw(st.integers(0, steps)), data.draw(st.integers(0, steps - 1))
    factor = rate_factor(step, steps, warmup, ScheduleSpec(name, (3,), None))
    assert 0 < factor <= 1


def test_every_parameter_group_keeps_its_own_rate() -> None:
    fast, slow = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [fast], "lr": 0.4}, {"params": [slow], "lr": 0.04}])
    hp = Hyperparameters.of(parse_run_spec(run_spec(warmupSteps=4)))

    LearningRateSetter(optimizer, hp).set(1)

    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.02])


class Groups:
    """An optimizer of parameter groups with these rates, under the recipe's schedule: a warm-up of 4 steps."""

    def __init__(self, *rates: float, own: bool = False, ramp: Ramp | None = None, **group: Any) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in rates]
        made = [{"params": [one], "lr": rate, **group} for one, rate in zip(parameters, rates, strict=True)]
        self.optimizer = torch.optim.SGD(made, lr=rates[0])
        self.said: list[str] = []
        self.lines: list[str] = []
        hp = Hyperparameters.of(parse_run_spec(run_spec(warmupSteps=4)))
        self.rates = LearningRateSetter(
            self.optimizer,
            hp,
            ramp,
            own=own,
            tell=lambda finding: self.said.append(finding.message),
            say=self.lines.append,
        )

    def put(self, *rates: float) -> None:
        """As a hook of the task does it."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def after(self, step: int) -> list[float]:
        self.rates.set(step)
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_rate_that_the_task_sets_stands_from_then_on_and_is_reported_once(at: int) -> None:
    groups = Groups(0.4, 0.04)
    for step in range(at):
        groups.after(step)
    groups.put(0.007, 0.005)
    assert groups.after(at) == [0.007, 0.005]
    groups.put(0.006, 0.005)
    assert groups.after(at + 1) == [0.006, 0.005]
    (said,) = groups.said
    assert said.startswith(f"step {at + 1}: ")
    assert "0.007" in said


def test_the_log_has_the_reason_of_the_rate_whenever_it_changes() -> None:
    groups = Groups(0.4, ramp=Ramp(0, 2, 0.5))
    for step in range(6):
        groups.after(step)
    groups.put(0.007)
    groups.after(6)
    assert groups.lines == [
        "step 1: the learning rate is 0.0666667, on a ramp of 2 steps to this slice's rate",
        "step 3: the learning rate is 0.3, in the warm-up of 4 steps",
        "step 5: the learning rate is 0.4, by the recipe's schedule Constant",
    ]
    assert [line.partition(": ")[0] for line in groups.said] == ["step 7"]
    own = Groups(0.4, own=True)
    own.after(0)
    own.after(1)
    assert own.lines == ["step 1: the learning rate is 0.4, by the task's own schedule"]


@pytest.mark.parametrize(
    ("schedule", "reduction", "expected"),
    [
        (ScheduleSpec("Cosine", (), None), 1.0, "by the recipe's schedule Cosine"),
        (ScheduleSpec("Step", (6, 9), None), 1.0, "by the recipe's schedule Step"),
        (ScheduleSpec("Step", (2, 4, 9), None), 1.0, "by the recipe's schedule Step, after milestone 4"),
        (ScheduleSpec("Plateau", (), None), 1.0, "by the recipe's schedule Plateau"),
        (
            ScheduleSpec("Plateau", (), None),
            0.25,
            "by the recipe's schedule Plateau, which has lowered it to 0.25 times the recipe's",
        ),
    ],
)
def test_the_reason_of_a_rate_names_the_schedule_and_what_it_has_done(
    schedule: ScheduleSpec, reduction: float, expected: str
) -> None:
    hp = replace(Hyperparameters.of(parse_run_spec(run_spec())), schedule=schedule)
    assert RecipeRate(hp, reduction).reason(5) == expected


def test_a_rate_that_the_task_leaves_alone_stays_the_recipes() -> None:
    groups = Groups(0.4)
    assert [groups.after(step)[0] for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert groups.said == []


def test_an_added_group_begins_with_the_rate_it_was_given() -> None:
    groups = Groups(0.4)
    groups.after(5)
    groups.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.01})
    assert groups.after(6) == [0.4, 0.01]
    assert groups.said == []


@pytest.mark.parametrize("is_new", [False, True], ids=["used in a step", "just set"])
@pytest.mark.parametrize(("built", "continued"), [(0.4, 0.003), (0.8, 0.006)], ids=["same slice", "another slice"])
def test_the_tasks_own_rate_goes_through_a_checkpoint(built: float, continued: float, is_new: bool) -> None:
    before = Groups(0.4)
    before.after(0)
    before.put(0.003)
    if not is_new:
        before.after(1)
    kept = json.loads(json.dumps(before.rates.state()))

    after = Groups(built, ramp=Ramp(2, 5, 0.5))
    after.rates.load(kept)
    assert (after.after(2), after.after(3), after.rates.ramp) == ([continued], [continued], None)
    (said,) = after.said
    assert said.startswith("before the checkpoint the")


def test_the_rate_of_a_removed_scheduler_is_not_restored() -> None:
    before = Groups(0.4, own=True)
    before.put(0.003)
    kept = json.loads(json.dumps(before.rates.state()))
    still, no_longer = Groups(0.4, own=True), Groups(0.4)
    for groups in (still, no_longer):
        groups.rates.load(kept)
        assert groups.said == []
    assert (still.after(1), no_longer.after(1)) == ([0.003], [0.2])


def test_the_recipes_rate_is_not_restored_from_a_checkpoint() -> None:
    before = Groups(0.4)
    before.after(0)
    after = Groups(0.8)
    after.rates.load(json.loads(json.dumps(before.rates.state())))
    assert after.after(1) == [0.4]


def test_a_layers_scale_applies_unless_its_rate_includes_it_already() -> None:
    layers = Groups(0.4, 0.4, lr_scale=0.5)
    layers.optimizer.param_groups[1]["lr_scale"] = 1.0
    assert layers.after(5) == [0.2, 0.2]
    apart = Groups(0.4, 0.04, lr_scale=0.1)
    assert apart.after(5) == pytest.approx([0.04, 0.04])
    assert Groups(0.4, own=True, lr_scale=0.5).after(5) == [0.4]


def test_an_optimizer_without_a_rate_stays_without_one() -> None:
    groups = Groups(0.4)
    rateless = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    rateless.param_groups[0]["lr"] = None
    rates = LearningRateSetter(rateless, groups.rates.recipe.hp)
    rates.set(0)
    assert (rateless.param_groups[0]["lr"], rates.current) == (None, 0.0)


def test_a_rate_in_a_tensor_that_is_filled_in_place_is_the_tasks() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    (group,) = optimizer.param_groups
    told: list[str] = []
    hp = Hyperparameters.of(parse_run_spec(run_spec(warmupSteps=4)))
    rates = LearningRateSetter(optimizer, hp, tell=lambda finding: told.append(finding.message))

    rates.set(0)
    group["lr"].fill_(0.25)
    rates.set(1)
    rates.set(2)

    assert float(group["lr"]) == 0.25
    assert len(told) == 1
    assert told[0].startswith("step 2: the task's own code")
    assert "0.25" in told[0]
    assert "0.125" in told[0]
    assert (rates.state()["whose"], rates.state()["built"]) == ("hooks", [0.5])


def test_a_rate_that_a_hook_fills_before_the_first_step_is_the_tasks() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    rates = LearningRateSetter(optimizer, Hyperparameters.of(parse_run_spec(run_spec(warmupSteps=4))))
    optimizer.param_groups[0]["lr"].fill_(0.25)
    rates.set(0)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_a_rate_in_a_tensor_follows_the_recipe_until_the_task_sets_it() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    rates = LearningRateSetter(optimizer, Hyperparameters.of(parse_run_spec(run_spec(warmupSteps=4))))
    seen = []
    for step in range(5):
        rates.set(step)
        seen.append(float(optimizer.param_groups[0]["lr"]))
    assert seen == [0.125, 0.25, 0.375, 0.5, 0.5]
