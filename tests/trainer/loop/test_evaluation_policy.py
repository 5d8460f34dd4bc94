"""What a run does because of its evaluations, with metrics that are written down beforehand, one for each step.

The best checkpoint is kept, the rate falls, the training ends; and a run that was interrupted decides as one that was
not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.task.test_task import hyperparameters
from tests.trainer.whole_runs import Ran, Stopping, run
from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import Mode
from tpu_trainer import Hyperparameters, Task
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.order import Share
from tpu_trainer.lightning import adopt
from tpu_trainer.loop.entrypoint import Loaded
from tpu_trainer.loop.evaluation_policy import MetricRule, MetricState

STEPS, EVERY = 40, 5
NAN = math.nan
LEAST = {"metric": "error", "mode": "Min"}
PLATEAU = {"name": "Plateau", "factor": "0.5", **LEAST, "patience": 2}


class Counting(nn.Module):
    """Counts its steps in a buffer, so that a resumed run evaluates as one that never stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


def made(errors: Sequence[float]) -> Callable[[Hyperparameters, int], Task]:
    """A task whose k-th evaluation has the error `errors[k]`, the last ones the last."""

    def task(hp: Hyperparameters, rank: int) -> Task:
        data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))

        def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
            model.steps += 1
            return model(batch[0]).square().mean()

        def metrics(model: Any, batch: tuple[Tensor]) -> dict[str, Tensor]:
            place = min(max(int(model.steps) // EVERY, 1), len(errors)) - 1
            return {"error": torch.full((len(batch[0]),), errors[place]), "steps": model.steps.expand(len(batch[0]))}

        return Task(Counting(), TensorDataset(data), loss, evaluation=TensorDataset(data[:5]), metrics=metrics)

    return task


def trained(errors: Sequence[float], directory: Path | None = None, *, attempt: int = 1, **changes: Any) -> Ran:
    checkpoint = {} if directory is None else {"uri": str(directory), "keep": 1, **changes.pop("checkpoint", {})}
    return run(
        made(errors),
        changes.pop("replicas", 1),
        trainSteps=STEPS,
        evaluateEverySteps=EVERY,
        job={"namespace": "default", "name": "small", "uid": "5f0c1234", "attempt": attempt},
        **({"checkpoint": checkpoint} if checkpoint else {}),
        **changes,
    )


def steps(directory: Path) -> list[int]:
    return sorted(int(folder.name.split("-")[1]) for folder in directory.glob("step-*"))


def test_the_best_checkpoint_stays_beside_the_newest_and_every_better_one_is_taken(tmp_path: Path) -> None:
    ran = trained([5, 3, 2, 4, NAN, 3], tmp_path, checkpoint={"keepBest": LEAST, "everySteps": 7}, replicas=2)
    assert ran.outcome.code is ExitCode.Succeeded
    # The best is of step 15, at which none was due.
    assert steps(tmp_path) == [15, 40]
    best = json.loads((tmp_path / "step-00000015-5f0c1234-1" / "COMMIT").read_text())
    assert best["evaluation"] == {"error": 2.0, "steps": 15.0}
    assert ran.outcomes[0].best == {"name": "step-00000015-5f0c1234-1", "step": 15, "metric": "error", "value": 2.0}


def test_the_best_of_an_earlier_attempt_stays(tmp_path: Path) -> None:
    errors, best = [5, 1, 4, 3, 2, 2], {"keepBest": LEAST, "everySteps": 4}
    first = trained(errors, tmp_path, checkpoint=best, stop=Stopping(22))
    assert first.outcome.code is ExitCode.Preempted
    again = trained(errors, tmp_path, checkpoint=best, attempt=2)
    assert steps(tmp_path) == [10, 40]
    assert again.outcome.best["name"] == "step-00000010-5f0c1234-1"


def test_on_another_slice_the_best_stays_and_the_wait_goes_on(tmp_path: Path) -> None:
    """Its steps have twice the examples."""
    errors, best = [5, 1, 4, 3, 2, 2, 2, 2], {"keepBest": LEAST, "everySteps": 4}
    stop = {**LEAST, "patience": 4}
    first = trained(errors, tmp_path, checkpoint=best, stopEarly=stop, stop=Stopping(22))
    assert first.outcome.code is ExitCode.Preempted
    changed = {"batch": {"global": 32, "perReplica": 32}, "evaluateEverySteps": 3, "trainSteps": 20}
    again = run(
        made(errors),
        job={"namespace": "default", "name": "small", "uid": "5f0c1234", "attempt": 2},
        checkpoint={"uri": str(tmp_path), "keep": 1, **best},
        stopEarly=stop,
        **changed,
    )
    # Two evaluations without improvement there, two here: after steps 12 and 15.
    assert "after step 15 of 20" in again.outcome.message
    assert "for 4 evaluations" in again.outcome.message
    assert 10 in steps(tmp_path)


def test_the_last_evaluation_can_be_the_best(tmp_path: Path) -> None:
    ran = trained([9, 8, 7, 6, 5, 4, 3, 2], tmp_path, checkpoint={"keepBest": LEAST})
    assert steps(tmp_path) == [40]
    assert (ran.outcome.best["step"], ran.outcome.best["value"]) == (40, 2.0)


def test_a_metric_that_is_never_finite_has_no_best_checkpoint(tmp_path: Path) -> None:
    ran = trained([NAN, math.inf, NAN], tmp_path, checkpoint={"keepBest": {"metric": "error", "mode": "Max"}})
    assert ran.outcome.code is ExitCode.Succeeded
    assert (steps(tmp_path), ran.outcome.best) == ([40], None)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"checkpoint": {"keepBest": {"metric": "accuracy", "mode": "Max"}}}, "checkpoint.keepBest"),
        ({"stopEarly": {"metric": "accuracy", "mode": "Max", "patience": 1}}, "recipe.stopEarly"),
        ({"schedule": {**PLATEAU, "metric": "accuracy"}}, "recipe.schedule"),
    ],
)
def test_a_metric_that_the_task_lacks_is_refused_before_the_first_step(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    ran = trained([1.0], tmp_path, **changes)
    assert ran.outcome.code is ExitCode.UserError
    assert ran.outcome.message.startswith(f"{field}: ")
    assert ran.outcome.message.endswith("; it reports error, steps")
    assert ran.losses == []


def test_a_run_ends_early_once_its_metric_stops_improving_on_all_replicas_with_a_checkpoint(tmp_path: Path) -> None:
    stop = {**LEAST, "patience": 3, "minDelta": "0.5"}
    ran = trained([5, 4, 3.8, NAN, 3.6, 1], tmp_path, stopEarly=stop, replicas=2)
    assert [outcome.code for outcome in ran.outcomes] == [ExitCode.Succeeded] * 2
    for outcome in ran.outcomes:
        assert "after step 25 of 40" in outcome.message
        assert "for 3 evaluations" in outcome.message
        assert "best value is 4," in outcome.message
    assert ran.outcomes[0].metrics["steps"] == 25.0
    assert steps(tmp_path) == [25]
    # Once, although the training ended with it.
    assert ran.evaluated == [5, 10, 15, 20, 25]

    # A gang that is started again, for whatever reason, does not train on.
    again = trained([5, 4, 3.8, NAN, 3.6, 1], tmp_path, stopEarly=stop, attempt=2)
    assert "after step 25 of 40" in again.outcome.message
    assert again.losses == []


@pytest.mark.parametrize("policy", [{}, {"schedule": PLATEAU, "stopEarly": {**LEAST, "patience": 4}}], ids=str)
@pytest.mark.parametrize("interrupted", [7, 10, 20, 23])
def test_an_interrupted_run_evaluates_and_decides_as_one_that_was_not(
    tmp_path: Path, interrupted: int, policy: dict[str, Any]
) -> None:
    """Also if it is stopped at an evaluation, for which it then has no time: the next attempt makes it."""
    errors = [5, 5, 5, 4, 5, 5, 5, 5]
    whole = trained(errors, tmp_path / "whole", **policy)
    first = trained(errors, tmp_path / "parts", **policy, stop=Stopping(interrupted))
    assert first.outcome.code is ExitCode.Preempted
    rest = trained(errors, tmp_path / "parts", **policy, attempt=2)
    assert first.losses + rest.losses == whole.losses
    assert len(first.losses) == interrupted
    assert rest.outcome.message == whole.outcome.message
    assert first.evaluated + rest.evaluated == whole.evaluated


class Module(lightning.LightningModule):
    """`Counting`, its own scheduler, and the rate of every step."""

    def __init__(self, errors: Sequence[float]) -> None:
        super().__init__()
        self.counting, self.errors, self.rates = Counting(), errors, list[float]()

    def training_step(self, batch: Any) -> Tensor:
        self.counting.steps += 1
        return self.counting(batch[0]).square().mean()

    def validation_step(self, batch: Any) -> None:
        self.log("error", self.errors[max(int(self.counting.steps) // EVERY, 1) - 1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(1))), batch_size=16)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(4, 3)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, cooldown=1)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "error"}


@pytest.mark.parametrize("interrupted", [14, 15, 20, 22])
def test_lightnings_scheduler_on_a_plateau_sets_the_rates_that_it_sets_by_itself(
    tmp_path: Path, interrupted: int
) -> None:
    errors = [5, 5, NAN, 5, 4, 4, 4, 4]
    own = Module(errors)
    scheduler = (parts := own.configure_optimizers())["lr_scheduler"]
    expected = []
    for step in range(1, STEPS + 1):
        expected.append(parts["optimizer"].param_groups[0]["lr"])
        if step % EVERY == 0:
            scheduler.step(errors[step // EVERY - 1])
    found: list[Module] = []

    def made(hp: Hyperparameters, rank: int) -> Loaded:
        found.append(Module(errors))
        return Loaded(*adopt(found[-1], None, hp, Share(rank, 1)))

    spec = {"trainSteps": STEPS, "evaluateEverySteps": EVERY, "checkpoint": {"uri": str(tmp_path), "keep": 1}}
    first = run(made, stop=Stopping(interrupted), **spec)
    assert first.outcome.code is ExitCode.Preempted, first.outcome.message
    assert run(made, **spec).outcome.code is ExitCode.Succeeded
    assert found[0].rates + found[1].rates == expected
    assert len(set(expected)) == 3


def test_lightnings_scheduler_on_a_plateau_needs_evaluations_during_the_training() -> None:
    _, hooks = adopt(Module([1.0]), None, hyperparameters(), Share(0, 1))
    with pytest.raises(
        UserCodeError, match=r"ReduceLROnPlateau without recipe.evaluateEverySteps.*trainer\.loop: Lightning"
    ):
        hooks.configure([], hyperparameters())


values = st.floats(0, 9, width=16) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(values=st.lists(values), patience=st.integers(1, 4), least=st.sampled_from([0.0, 0.5]))
def test_the_state_of_a_rule_counts_the_values_since_the_best(values: list[float], patience: int, least: float) -> None:
    for mode, sign in ((Mode.MIN, 1), (Mode.MAX, -1)):
        rule, state, best, waited = MetricRule("m", mode, least), MetricState(), math.inf, 0
        for value in values:
            state = state.after(value, rule)
            if math.isfinite(value) and sign * value < best - least:
                best, waited = sign * value, 0
            else:
                waited += 1
            assert state.waited == waited
            assert state.best == (None if best == math.inf else sign * best)
