"""What is known of the first steps of a run, before its first regular report: their losses and learning rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer.gang_processes import run_spec
from tests.trainer.in_process import run
from tests.trainer.tasks import Network, examples, loss
from tpu_contract.protocol import ExitCode
from tpu_trainer import Hyperparameters, Task

if TYPE_CHECKING:
    from torch import Tensor, nn


def fails_in_step_5(hp: Hyperparameters) -> Task:
    calls = 0

    def failing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ValueError("no such token")
        return loss(model, batch)

    return Task(model=Network(), train=examples(), loss=failing)


def test_a_failure_in_step_5_leaves_the_losses_and_rates_of_the_four_steps_before(tmp_path: Path) -> None:
    entrypoint = f"{__name__}:fails_in_step_5"
    ended = run(run_spec(entrypoint=entrypoint, replicas=1, warmupSteps=3, report={"uri": str(tmp_path)}), tmp_path)
    assert (ended.outcome.code, ended.outcome.step) == (ExitCode.UserError, 4)
    assert "no such token" in ended.outcome.message
    recorded = json.loads((tmp_path / "history.json").read_bytes())["recorded"]
    assert [(point["step"], point["count"]) for point in recorded["losses"]] == [(step, 1) for step in range(1, 5)]
    assert recorded["attempts"][0]["last"] == len(ended.losses) == 4
    rates = {point["step"]: point["rate"] for point in recorded["rates"]["points"]}
    assert rates == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.3})
