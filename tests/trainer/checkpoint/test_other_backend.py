"""A job that moves to another backend keeps the optimizer's state: torch's own there, the traced one on XLA."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainer import plain, tasks
from tests.trainer.gang_processes import Launcher, run_spec

STEPS = 24
LEGS = (("torch", 8), ("xla", 16), ("torch", STEPS))

RULES = plain.RECIPES | {"rmsprop": partial(torch.optim.RMSprop, lr=0.003, weight_decay=1e-4)}


@pytest.mark.parametrize("name", RULES)
def test_losses_of_a_job_that_moves_to_xla_and_returns_are_plain_pytorchs(
    launcher: Launcher, tmp_path: Path, name: str
) -> None:
    rule = RULES[name]
    losses: list[float] = []
    for backend, steps in LEGS:
        spec = run_spec(
            backend=backend,
            hosts=1,
            replicas=1,
            warmupSteps=0,
            trainSteps=steps,
            checkpoint={"uri": str(tmp_path / "checkpoints"), "everySteps": 8, "keep": 1},
            optimizer=name,
        )
        spec["optimizer"]["learningRate"] = str(rule.keywords["lr"])
        leg = launcher.start(spec)
        assert leg.wait() == [0], leg.output()
        losses += leg.losses()

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return rule(model.parameters())

    _, expected = plain.trained(tasks.Network, tasks.examples(), tasks.loss, build, steps=STEPS)
    assert losses == pytest.approx(expected, abs=1e-5)
