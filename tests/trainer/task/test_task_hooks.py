"""What a plain Task may do around its steps: its hooks, its scheduler, and its finish."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from tests.trainer.tasks import Network, examples, loss, weighed
from tests.trainer.whole_runs import Never, Ran, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hooks, Task, log
from tpu_trainer.task.hooks import OFFERED

EPOCH = 4
"""Steps of 16 in an epoch of the 72 examples."""


class Noting(Hooks):
    """Notes every call, and the rate of every step."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.rates, self.loaded = calls, [], {}
        self.steps = 0

    def train_begins(self) -> None:
        self.calls.append("train begins")

    def epoch_begins(self, epoch: int) -> None:
        self.calls.append(f"epoch {epoch} begins")

    def step_begins(self, batch: Any, step: int) -> None:
        self.calls.append(f"step {step} begins")

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def after_step(self, batch: Any, loss: torch.Tensor, step: int) -> None:
        self.calls.append(f"step {step} ends")
        self.steps = step
        log("steps", step)

    def evaluation_ends(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(f"evaluated {sorted(metrics)} after {step}")

    def epoch_ends(self, epoch: int) -> None:
        self.calls.append(f"epoch {epoch} ends")

    def train_ends(self, *, stopped: bool) -> None:
        self.calls.append(f"train ends{', stopped' if stopped else ''}")

    def state(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "ones": torch.ones(2)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.loaded = dict(state)


def test_hooks_are_called_in_order_on_every_replica() -> None:
    hooks = [Noting([]) for _ in range(2)]

    def made(hp: Any, rank: int) -> Task:
        given = weighed(hp)
        return dataclasses.replace(given, hooks=hooks[rank])

    ran = run(made, 2, trainSteps=EPOCH + 1, evaluateEverySteps=EPOCH)
    steps = {step: [f"step {step} begins", f"step {step} ends"] for step in range(1, EPOCH + 2)}
    expected = [
        *("train begins", "epoch 0 begins", *steps[1], *steps[2], *steps[3], *steps[4]),
        *("evaluated ['length'] after 4", "epoch 0 ends", "epoch 1 begins", *steps[5]),
        *("epoch 1 ends", "train ends", "evaluated ['length'] after 5"),
    ]
    assert [each.calls for each in hooks] == [expected, expected]
    # What a hook logs after the last step counts, too.
    assert ran.outcome.metrics["steps"] == EPOCH + 1


Made = Callable[[Hooks], Task]


def continued(made: Made, directory: Path, stop_after: int, replicas: int = 1, **later: Any) -> tuple[Noting, Noting]:
    """The hooks of a run that is stopped, and those of the run that continues it, with `later` in its run spec."""
    checkpoint = {"uri": str(directory), "keep": 1}
    first, second = Noting([]), Noting([])

    class Stop(Never):
        def __call__(self) -> bool:
            return first.steps >= stop_after

    ran = run(lambda hp, rank: made(first), stop=Stop(), trainSteps=24, checkpoint=checkpoint)
    assert ran.outcome.code is ExitCode.Preempted
    ran = run(lambda hp, rank: made(second), **{"trainSteps": 24, "checkpoint": checkpoint, **later})
    assert ran.outcome.code is ExitCode.Succeeded, ran.outcome.message
    return first, second


def test_what_hooks_keep_is_in_the_checkpoint(tmp_path: Path) -> None:
    _, second = continued(lambda hooks: Task(Network(), examples(), loss, hooks=hooks), tmp_path, 6)
    assert second.loaded["steps"] == second.steps - len(second.rates)
    assert torch.equal(second.loaded["ones"], torch.ones(2))


def inverse(optimizer: torch.optim.Optimizer, hp: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda done: 1 - done / hp.train_steps)


def by_epoch(optimizer: torch.optim.Optimizer, hp: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda epochs: 0.5**epochs)


@pytest.mark.parametrize(
    ("scheduler", "factor"),
    [
        (inverse, lambda done: 1 - done / 24),
        ((inverse, "step"), lambda done: 1 - done / 24),
        ((by_epoch, "epoch"), lambda done: 0.5 ** (done // EPOCH)),
    ],
    ids=["steps", "steps by name", "epochs"],
)
def test_a_scheduler_sets_the_rates_and_a_continued_run_has_the_same(
    tmp_path: Path, scheduler: Any, factor: Callable[[int], float]
) -> None:
    def made(hooks: Hooks) -> Task:
        return Task(Network(), examples(), loss, scheduler=scheduler, hooks=hooks)

    first, second = continued(made, tmp_path, 10, warmupSteps=5)
    expected = [0.1 * factor(done) for done in range(24)]
    done = 24 - len(second.rates)
    assert first.rates == pytest.approx(expected[:done])
    assert second.rates == pytest.approx(expected[done:])
    assert second.loaded["steps"] == done


def test_on_another_slice_a_scheduler_gets_the_new_number_of_steps(tmp_path: Path) -> None:
    def made(hooks: Hooks) -> Task:
        return Task(Network(), examples(), loss, scheduler=inverse, hooks=hooks)

    _, second = continued(made, tmp_path, 10, trainSteps=12, batch={"global": 32, "perReplica": 32})
    done = 12 - len(second.rates)
    assert 4 < done < 10
    assert second.rates == pytest.approx([0.1 * (1 - step / 12) for step in range(done, 12)])


def test_the_recipes_schedule_is_said_to_be_unused() -> None:
    ran = run(lambda hp, rank: Task(Network(), examples(), loss, scheduler=inverse), trainSteps=4, warmupSteps=2)
    (warning,) = ran.warnings
    assert warning.startswith("the task schedules the")
    assert "2 steps" in warning


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        (
            lambda optimizer, hp: ReduceLROnPlateau(optimizer),
            "ReduceLROnPlateau waits for a",
        ),
        (lambda optimizer, hp: None, "NoneType is not a scheduler:"),
        (lambda optimizer, hp: inverse(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), hp), "another optimizer"),
    ],
)
def test_what_is_no_scheduler_of_steps_is_refused(scheduler: Any, why: str) -> None:
    outcome = run(lambda hp, rank: Task(Network(), examples(), loss, scheduler=scheduler)).outcome
    assert outcome.code is ExitCode.UserError
    assert why in outcome.message


class Own(Hooks):
    def after_backward(self) -> None: ...


class Misspelt(Hooks):
    def epoch_end(self, epoch: int) -> None: ...


class WithHelpers(Hooks):
    """`epoch_end` is a method of its own: `epoch_ends` is there, too, and calls it."""

    def epoch_ends(self, epoch: int) -> None:
        self.epoch_end(epoch)

    def epoch_end(self, epoch: int) -> None: ...

    def states(self) -> None: ...


def test_hooks_may_have_methods_of_their_own() -> None:
    assert Task(Network(), examples(), loss, hooks=WithHelpers()).hooks is not None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"hooks": Misspelt()}, "have epoch_end(), which the trainer does not call; the hook is epoch_ends()"),
        ({"hooks": Own()}, f"must not override after_backward; they may override {', '.join(OFFERED)}"),
        ({"hooks": Own}, "must be an object of a class derived from tpu_trainer.Hooks"),
        ({"scheduler": (inverse, "batch")}, '"step" or "epoch"'),
    ],
)
def test_what_a_task_cannot_have_is_said_when_it_is_made(wrong: Any, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        Task(Network(), examples(), loss, **wrong)


def finished(finish: Callable[[nn.Module], object], directory: Path, **spec: Any) -> Ran:
    def made(hp: Any, rank: int) -> Task:
        return Task(Network(), examples(), loss, finish=finish)

    return run(made, 2, trainSteps=4, checkpoint={"uri": str(directory), "keep": 1}, **spec)


def test_finish_gets_the_evaluated_model_once_the_last_checkpoint_is_written(tmp_path: Path) -> None:
    given: list[Any] = []

    def finish(model: nn.Module) -> None:
        assert not model.training
        written = [file.parent.name for file in tmp_path.rglob("COMMIT")]
        given.append((written, [parameter.detach().clone() for parameter in model.parameters()]))

    ran = finished(finish, tmp_path, emaDecay="0.5")
    ((written, weights),) = given
    assert len(written) == 1
    # The averaged weights are the evaluated ones.
    assert not any(torch.equal(a, b) for a, b in zip(weights, ran.weights(), strict=True))


def test_a_finish_that_fails_is_the_tasks_error_and_the_checkpoint_stays(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    def finish(model: nn.Module) -> None:
        raise OSError("no such bucket")

    ran = finished(finish, tmp_path)
    assert [outcome.code for outcome in ran.outcomes] == [ExitCode.UserError] * 2
    assert "no such bucket" in ran.outcomes[0].message
    assert ran.outcomes[1].message == snapshot
    assert len(list(tmp_path.rglob("COMMIT"))) == 1
