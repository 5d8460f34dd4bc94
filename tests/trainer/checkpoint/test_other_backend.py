"""A job that moves to another backend keeps the optimizer's state: torch's own there, the traced one on XLA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainer import tasks
from tests.trainer.gang_processes import Launcher, run_spec
from tpu_trainer.data.order import MapStyleData, Order, Share

BATCH, STEPS = 16, 24
LEGS = (("torch", 8), ("xla", 16), ("torch", STEPS))

RULES: dict[str, tuple[str, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ("0.3", lambda of: torch.optim.SGD(of, lr=0.3, momentum=0.9, weight_decay=1e-4)),
    "adamw": ("0.02", lambda of: torch.optim.AdamW(of, lr=0.02, weight_decay=1e-4)),
    "rmsprop": ("0.003", lambda of: torch.optim.RMSprop(of, lr=0.003, weight_decay=1e-4)),
}


@pytest.mark.parametrize("name", RULES)
def test_losses_of_a_job_that_moves_to_xla_and_returns_are_plain_pytorchs(
    launcher: Launcher, tmp_path: Path, name: str
) -> None:
    rate, make = RULES[name]
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
        spec["optimizer"]["learningRate"] = rate
        leg = launcher.start(spec)
        assert leg.wait() == [0], leg.output()
        losses += leg.losses()
    assert losses == pytest.approx(by_hand(make), abs=1e-5)


def by_hand(make: Callable[..., torch.optim.Optimizer]) -> list[float]:
    torch.manual_seed(3)
    model = tasks.Network()
    rule = make(model.parameters())
    features, labels = tasks.examples().tensors
    passes = MapStyleData.of(tasks.EXAMPLES, Order(BATCH, 3, Share(0, 1))).passes(0)
    losses = []
    for _ in range(STEPS):
        _, rows, _ = next(passes)
        rule.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(features[rows.tolist()]), labels[rows.tolist()])
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return losses
