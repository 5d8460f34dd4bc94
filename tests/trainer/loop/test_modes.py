"""A `train()` of a model's own class is called where a plain loop calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer import plain
from tests.trainer.loop.test_what_is_trained import Net, examples, loss
from tests.trainer.whole_runs import Ran, Stopping, run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Task
from tpu_trainer.task.task import Hyperparameters

STEPS = 12


class Backbone(nn.Module):
    """Its norm keeps its statistics, whatever mode it is put into."""

    def __init__(self) -> None:
        super().__init__()
        self.back, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.back(x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Outer(Frozen):
    """Decides against what the part below decides for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.backbone(x)))

    def train(self, mode: bool = True) -> Outer:
        super().train(mode)
        self.backbone.norm.train(mode)
        self.norm.eval()
        return self


class Adapted(Net):
    """Adds an adapter to a weight for evaluations, and takes it away for training."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Parameter(torch.full((6, 6), 0.1))
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if self.merged == mode:
            self.back.weight.data += -self.adapter if mode else self.adapter
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        weight = self.back.weight if self.merged else self.back.weight + self.adapter
        return self.head(torch.tanh(nn.functional.linear(x, weight, self.back.bias)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def task(make: type[nn.Module]) -> Any:
    def made(hp: Hyperparameters, rank: int) -> Task:
        def score(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            return {"score": model(batch[0]).sum(dim=1)}

        return Task(
            make(),
            examples(),
            loss,
            optimizer=lambda given, hp: torch.optim.SGD(given, lr=0.1),
            evaluation=examples(),
            metrics=score,
        )

    return made


def ended(ran: Ran, code: ExitCode = ExitCode.Succeeded) -> Ran:
    assert ran.outcome.code is code, ran.outcome.message
    return ran


@pytest.mark.parametrize("make", [Frozen, Outer, Adapted])
def test_it_is_called_before_the_first_step_and_after_evaluations(tmp_path: Path, make: type[nn.Module]) -> None:
    _, expected = plain.trained(lambda: make().train(), examples(), loss, sgd, steps=STEPS)
    assert ended(run(task(make), trainSteps=STEPS)).losses == pytest.approx(expected, rel=1e-5)
    assert ended(run(task(make), trainSteps=STEPS, evaluateEverySteps=2)).losses == pytest.approx(expected, rel=1e-5)
    checkpoint = {"uri": str(tmp_path), "keep": 1}
    first = ended(run(task(make), stop=Stopping(5), trainSteps=STEPS, checkpoint=checkpoint), ExitCode.Preempted)
    second = ended(run(task(make), trainSteps=STEPS, checkpoint=checkpoint))
    assert first.losses + second.losses == pytest.approx(expected, rel=1e-5)


def test_a_part_that_the_task_has_put_into_evaluation_mode_stays_in_it() -> None:
    class Resting(Outer):
        def __init__(self) -> None:
            super().__init__()
            self.backbone.norm.eval()

    ran = ended(run(task(Resting), trainSteps=STEPS, evaluateEverySteps=2))
    model = ran.models[0]
    assert isinstance(model, Resting)
    assert model.backbone.norm.num_batches_tracked == model.norm.num_batches_tracked == 0
