"""A loss or gradients that are not finite: recipe.onNotFinite, and the checkpoints such a run leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.trainer import plain
from tests.trainer.whole_runs import run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Task
from tpu_trainer.checkpoint.checkpointer import Checkpointer
from tpu_trainer.loop.entrypoint import Loaded

ADAMW = {"name": "adamw", "learningRate": "0.05", "weightDecay": "0.1"}
MOMENTUM = {"name": "sgd", "learningRate": "0.1", "momentum": "0.9"}


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(72, 6, generator=generator), torch.randint(0, 3, (72,), generator=generator))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Infinite(torch.autograd.Function):
    """A finite value whose gradient is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.inf


def bad_at(steps: Collection[int], value: float | str = math.nan, rank: int = 0) -> Callable[[Any, int], Task]:
    """A task whose loss becomes `value` in some steps on one rank, or ("gradients") only its gradients do. What the
    forward pass sees is not finite either, as with a broken example."""

    def task(hp: Any, own: int) -> Task:
        calls = 0

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            nonlocal calls
            calls += 1
            bad = calls in steps and own == rank
            features = batch[0] * value if bad and isinstance(value, float) else batch[0]
            found = nn.functional.cross_entropy(model(features), batch[1])
            return Infinite.apply(found) if bad and isinstance(value, str) else found

        return Task(model=Net(), train=examples(), loss=loss)

    return task


def kept_in(directory: Path) -> dict[int, bool]:
    """The steps of the committed checkpoints, and whether each says that it is clean."""
    commits = [json.loads(path.read_bytes()) for path in directory.rglob("COMMIT")]
    return {commit["step"]: commit["clean"] for commit in commits}


def test_a_run_that_ends_reports_a_checkpoint_that_was_committed_after_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with slow storage: no write has ended yet when the loop looks.
    monkeypatch.setattr(Checkpointer, "overdue", lambda self: False)
    checkpoint = {"uri": str(tmp_path), "everySteps": 10, "keep": 9}
    ran = run(bad_at([33]), checkpoint=checkpoint, trainSteps=100)
    assert ran.outcome.code is ExitCode.NotFinite
    assert kept_in(tmp_path) == {10: True, 20: True, 30: True}
    assert ran.outcome.checkpoint_step == 30


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("value", "what"),
    [
        (math.nan, "the loss is nan"),
        (math.inf, "the loss is nan"),
        ("gradients", "the gradients are not finite"),
    ],
)
def test_a_run_stops_at_the_first_step_that_is_not_finite_and_keeps_its_checkpoints(
    tmp_path: Path, value: float | str, what: str, replicas: int
) -> None:
    checkpoint = {"uri": str(tmp_path), "everySteps": 10, "keep": 2}
    ran = run(bad_at([33], value, rank=replicas - 1), replicas, checkpoint=checkpoint, trainSteps=100)
    assert (ran.outcome.code, ran.outcome.step) == (ExitCode.NotFinite, 33)
    assert {outcome.message for outcome in ran.outcomes} == {ran.outcome.message}
    assert ran.outcome.message.startswith(what)
    assert "since step 33 (learning rate" in ran.outcome.message
    assert "0.1" in ran.outcome.message
    assert kept_in(tmp_path) == {20: True, 30: True}


def test_with_warn_a_run_continues_says_so_and_keeps_the_last_clean_checkpoint(tmp_path: Path) -> None:
    checkpoint = {"uri": str(tmp_path), "everySteps": 10, "keep": 2}
    ran = run(bad_at([33]), 2, checkpoint=checkpoint, trainSteps=60, onNotFinite="Warn")
    assert ran.outcome.code is ExitCode.Succeeded
    assert "in 28 steps, first in step 33" in ran.outcome.message
    assert "the loss is nan in step 33" in ran.warnings[0]
    assert kept_in(tmp_path) == {30: True, 50: False, 60: False}


def test_a_restarted_run_knows_that_its_checkpoint_is_not_clean(tmp_path: Path) -> None:
    recipe = {"checkpoint": {"uri": str(tmp_path), "everySteps": 10, "keep": 1}, "onNotFinite": "Warn"}
    run(bad_at([15]), trainSteps=20, **recipe)
    run(bad_at([]), trainSteps=40, **recipe)
    assert kept_in(tmp_path) == {10: True, 40: False}


@pytest.mark.parametrize(
    ("recipe", "steps"), [(ADAMW, (1, 7)), (MOMENTUM, (1, 8)), (ADAMW, (7, 8, 23))], ids=["adamw", "momentum", "often"]
)
@pytest.mark.parametrize("value", [math.nan, "gradients"])
def test_a_skipped_step_leaves_no_trace(recipe: dict[str, str], value: float | str, steps: Collection[int]) -> None:
    ran = run(bad_at(steps, value), recipe=recipe, onNotFinite="Skip")
    assert ran.outcome.code is ExitCode.Succeeded
    torch.manual_seed(plain.SEED)
    model = Net()
    if recipe is ADAMW:
        rule: Any = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    else:
        rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (features, labels) in enumerate(plain.batches(examples(), 40), start=1):
        if step not in steps:
            rule.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            rule.step()
    assert plain.distance(ran.models[0], model) < 1e-6
    for ours, theirs in zip(ran.models[0].buffers(), model.buffers(), strict=True):
        assert torch.allclose(ours, theirs)


def test_a_run_with_a_skipped_step_agrees_on_all_replicas_and_resumes_bit_equal(
    tmp_path: Path,
) -> None:
    whole = run(bad_at([13], rank=1), 2, recipe=ADAMW, onNotFinite="Skip")
    whole.assert_replicas_equal()
    assert whole.outcome.message.endswith("or gradients were not finite")
    assert whole.warnings[0].startswith("step 13 was skipped: the loss")
    assert "0.05" in whole.warnings[0]
    rest = {"checkpoint": {"uri": str(tmp_path), "everySteps": 14, "keep": 9}, "recipe": ADAMW, "onNotFinite": "Skip"}
    run(bad_at([13], rank=1), 2, **rest)
    assert kept_in(tmp_path) == {14: True, 28: True, 40: True}
    for path in tmp_path.rglob("COMMIT"):
        if "step-00000014" not in str(path):
            path.unlink()
    resumed = run(bad_at([]), 2, **rest)
    assert plain.distance(resumed.models[0], whole.models[0]) == 0


def test_a_run_whose_steps_are_all_skipped_does_not_succeed() -> None:
    outcome = run(bad_at(range(1, 41)), 2, onNotFinite="Skip").outcome
    assert outcome.code is ExitCode.NotFinite
    assert outcome.message.startswith("the last 40 steps were all")
    assert "step 40" in outcome.message


def test_a_restarted_run_whose_steps_are_all_skipped_does_not_succeed(tmp_path: Path) -> None:
    recipe = {"checkpoint": {"uri": str(tmp_path), "everySteps": 30, "keep": 9}, "onNotFinite": "Skip"}
    run(bad_at(range(1, 41)), 2, **recipe)
    assert kept_in(tmp_path) == {30: True}
    outcome = run(bad_at(range(1, 41)), 2, **recipe).outcome
    assert outcome.code is ExitCode.NotFinite
    assert outcome.message.startswith("the last 40 steps were all")
    assert "step 40" in outcome.message


def test_a_restarted_run_counts_the_steps_skipped_before_the_restart(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    recipe = {"checkpoint": {"uri": str(tmp_path), "everySteps": 20, "keep": 9}, "onNotFinite": "Skip"}
    run(bad_at([3, 7]), trainSteps=20, **recipe)
    # The task counts its calls from the start of its own process: step 25 is the fifth here.
    ran = run(bad_at([5]), trainSteps=40, **recipe)
    assert "step 25" in str(ran.warnings)
    assert "0.1" in str(ran.warnings)
    assert ran.warnings == snapshot
    assert ran.outcome.message.endswith("or gradients were not finite")
    assert "3 steps" in ran.outcome.message


def test_a_skipped_step_does_not_end_a_run_whose_later_steps_are_finite() -> None:
    outcome = run(bad_at(range(3, 42)), onNotFinite="Skip", trainSteps=130).outcome
    assert outcome.code is ExitCode.Succeeded
    assert run(bad_at(range(3, 130)), onNotFinite="Skip", trainSteps=130).outcome.code is ExitCode.NotFinite


def statistics_overflow(hp: Any, rank: int) -> Task:
    """One batch makes a norm's running statistics infinite. Loss and gradients stay finite, since the norm divides by
    what it sees."""
    model, calls = Net(), 0
    model.norm = nn.BatchNorm1d(6)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        features = model.norm(batch[0] * (1e25 if calls == 15 else 1))  # type: ignore[operator]
        return nn.functional.cross_entropy(model(features), batch[1])

    return Task(model=model, train=examples(), loss=loss)


@pytest.mark.parametrize("policy", ["Stop", "Skip", "Warn"])
def test_running_statistics_that_are_not_finite_are_treated_like_such_weights(tmp_path: Path, policy: str) -> None:
    checkpoint = {"uri": str(tmp_path), "everySteps": 10, "keep": 9}
    ran = run(statistics_overflow, 2, checkpoint=checkpoint, onNotFinite=policy)
    text = "the running statistics are not finite after step 20, first in norm.running_var"
    if policy == "Warn":
        assert any(warning.startswith(text) for warning in ran.warnings)
        assert kept_in(tmp_path) == {10: True, 20: False, 30: False, 40: False}
    else:
        assert ran.outcome.code is ExitCode.NotFinite
        assert ran.outcome.message.startswith(text)
        assert kept_in(tmp_path) == {10: True}


def test_float16_parameters_are_trained_and_an_overflow_ends_the_run() -> None:
    def half(scale: float) -> Callable[[Any, int], Loaded | Task]:
        def task(hp: Any, rank: int) -> Task:
            model = nn.Linear(6, 3).half()
            return Task(
                model=model,
                train=examples(),
                loss=lambda m, batch: nn.functional.cross_entropy(m(batch[0].half() * scale), batch[1]),
            )

        return task

    fine = run(half(1.0), 2)
    assert fine.outcome.code is ExitCode.Succeeded
    fine.assert_replicas_equal()
    assert run(half(65504.0), 2).outcome.code is ExitCode.NotFinite


class Overflowing(torch.optim.SGD):
    """Finite gradients whose update is not, in one step."""

    def __init__(self, parameters: Any, at: int) -> None:
        super().__init__(parameters, lr=0.1)
        self._at, self._steps = at, 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self._steps += 1
        if self._steps == self._at:
            with torch.no_grad():
                self.param_groups[0]["params"][-1][0] = math.inf


def overflowing(at: int) -> Callable[[Any, int], Task]:
    def task(hp: Any, rank: int) -> Task:
        return Task(
            model=Net(),
            train=examples(),
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda parameters, hp: Overflowing(parameters, at),
        )

    return task


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("policy", ["Stop", "Skip"])
@pytest.mark.parametrize("saves", [True, False])
def test_an_update_that_makes_the_weights_infinite_ends_the_run_even_in_the_last_step(
    tmp_path: Path, replicas: int, policy: str, saves: bool
) -> None:
    checkpoint = {"checkpoint": {"uri": str(tmp_path), "everySteps": 10, "keep": 9}} if saves else {}
    ran = run(overflowing(20), replicas, trainSteps=20, onNotFinite=policy, **checkpoint)
    assert (ran.outcome.code, ran.outcome.step) == (ExitCode.NotFinite, 20)
    assert {outcome.message for outcome in ran.outcomes} == {ran.outcome.message}
    assert ran.outcome.message.startswith("the weights are not finite")
    assert "first in head.bias" in ran.outcome.message
    assert "step 20" in ran.outcome.message
    assert kept_in(tmp_path) == ({10: True} if saves else {})


def test_with_warn_weights_that_are_not_finite_are_only_reported(tmp_path: Path) -> None:
    checkpoint = {"uri": str(tmp_path), "everySteps": 10, "keep": 9}
    ran = run(overflowing(20), 2, trainSteps=20, onNotFinite="Warn", checkpoint=checkpoint)
    assert ran.outcome.code is ExitCode.Succeeded
    assert ran.outcome.message.endswith("were not finite after step 20")
    assert ran.warnings[0].startswith("the weights are not finite")
    assert "step 20" in ran.warnings[0]
    assert kept_in(tmp_path) == {10: True, 20: False}


def test_an_average_that_is_not_finite_ends_the_run_even_if_the_weights_are_finite() -> None:
    def task(hp: Any, rank: int) -> Task:
        found = overflowing(20)(hp, rank)
        # Back to finite weights before anything sees them: only the average has taken the infinite one in.
        step = [0]

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            step[0] += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.nan_to_num_(posinf=0.0)
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        return Task(model=found.model, train=found.train, loss=loss, optimizer=found.optimizer)

    outcome = run(task, 2, trainSteps=30, emaDecay="0.9").outcome
    assert outcome.code is ExitCode.NotFinite
    assert "are not finite after step 30" in outcome.message
    assert "first in head.bias" in outcome.message


def test_frozen_parameters_may_be_infinite() -> None:
    def task(hp: Any, rank: int) -> Task:
        found = overflowing(0)(hp, rank)
        found.model.register_parameter("mask", nn.Parameter(torch.tensor([-math.inf]), requires_grad=False))
        return found

    assert run(task, 2).outcome.code is ExitCode.Succeeded


def test_a_metric_that_is_not_finite_at_the_end_is_a_warning(snapshot: SnapshotAssertion) -> None:
    def task(hp: Any, rank: int) -> Task:
        found = bad_at([])(hp, rank)
        metrics = lambda model, batch: {  # noqa: E731
            "accuracy": torch.ones(len(batch[1])),
            "error": torch.full((len(batch[1]),), math.nan),
        }
        return replace(found, evaluation=examples(), metrics=metrics)

    ran = run(task, 2)
    assert ran.outcome.code is ExitCode.Succeeded
    assert ran.warnings == snapshot


def test_an_empty_evaluation_dataset_is_a_warning(snapshot: SnapshotAssertion) -> None:
    def task(hp: Any, rank: int) -> Task:
        found = bad_at([])(hp, rank)
        return replace(found, evaluation=TensorDataset(torch.zeros(0, 6)), metrics=lambda model, batch: {})

    ran = run(task, 2)
    assert ran.outcome.code is ExitCode.Succeeded
    assert ran.warnings == snapshot


def test_float16_parameters_that_adam_divides_by_zero_end_the_run() -> None:
    def task(hp: Any, rank: int) -> Task:
        features, labels = examples().tensors
        dead = features.clone()
        dead[:, 2] = 0
        return Task(
            model=nn.Linear(6, 3).half(),
            train=TensorDataset(dead.half(), labels),
            loss=lambda m, batch: nn.functional.cross_entropy(m(batch[0]).float(), batch[1]),
        )

    outcome = run(task, trainSteps=1, recipe={"name": "adam", "learningRate": "0.05"}).outcome
    assert outcome.code is ExitCode.NotFinite


def test_metrics_for_which_the_result_has_no_room_are_a_warning(snapshot: SnapshotAssertion) -> None:
    def task(hp: Any, rank: int) -> Task:
        found = bad_at([])(hp, rank)
        metrics = lambda model, batch: {f"m{number}": torch.ones(len(batch[1])) for number in range(65)}  # noqa: E731
        return replace(found, evaluation=examples(), metrics=metrics)

    assert "64" in str(run(task, 1).warnings)
    assert run(task, 1).warnings == snapshot
