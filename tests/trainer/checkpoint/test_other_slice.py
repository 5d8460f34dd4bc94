"""A run that continues on a slice of another size trains on the remaining examples in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer import tasks
from tests.trainer.gang_processes import Launcher, run_spec
from tpu_trainer.data.order import MapStyleData, Order, Position, Share

FIRST, STEPS, BATCH, RATE = 10, 24, 16, 0.3


def by_hand(batch: int, rate: float, steps: int, ramp: list[float]) -> list[float]:
    """FIRST steps with BATCH in plain PyTorch, then the rest with `batch`, one process; the losses of the rest."""
    torch.manual_seed(3)
    model = tasks.Network()
    rule = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
    features, labels = tasks.examples().tensors
    losses: list[float] = []

    def train(size: int, rates: list[float], position: Position) -> Position:
        steps = MapStyleData.of(tasks.EXAMPLES, Order(size, 3, Share(0, 1), start=position)).passes(0)
        for now in rates:
            _, rows, position = next(steps)
            rule.param_groups[0]["lr"] = now
            rule.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(features[rows.tolist()]), labels[rows.tolist()])
            loss.backward()
            rule.step()
            losses.append(loss.item())
        return position

    rest = steps - FIRST * BATCH // batch
    rates = [rate * factor for factor in ramp] + [rate] * (rest - len(ramp))
    train(batch, rates, train(BATCH, [RATE] * FIRST, Position()))
    return losses[FIRST:]


@pytest.mark.parametrize(
    ("batch", "hosts", "rate", "ramp"),
    [
        # Twice the batch and the rate: the ramp is 5 % of the 7 steps that are left, one step between old and new.
        (32, 2, 0.6, [0.75]),
        # A third of it: a lower rate is taken at once.
        (8, 1, 0.15, []),
        # No multiple of the old batch: 160 examples are 6 steps and 16 examples of 24.
        (24, 3, 0.3, []),
    ],
)
def test_losses_equal_plain_pytorch_that_changes_its_batch_midway(
    launcher: Launcher, tmp_path: Path, batch: int, hosts: int, rate: float, ramp: list[float]
) -> None:
    checkpoint = {"uri": str(tmp_path / "checkpoints"), "everySteps": FIRST, "keep": 1}
    whole = run_spec(hosts=1, replicas=1, warmupSteps=0, trainSteps=FIRST, checkpoint=checkpoint)
    first = launcher.start(whole)
    assert first.wait() == [0], first.output()
    steps = -(-STEPS * BATCH // batch)
    spec = run_spec(hosts=hosts, replicas=hosts, warmupSteps=0, trainSteps=steps, checkpoint=checkpoint)
    spec["batch"] = {"global": batch, "perReplica": batch // hosts}
    spec["optimizer"]["learningRate"] = str(rate)
    second = launcher.start(spec)
    assert set(second.wait()) == {0}, second.output()
    assert second.losses() == pytest.approx(by_hand(batch, rate, steps, ramp), abs=1e-5)
    assert f"{FIRST * BATCH} examples were seen" in second.hosts[0].output


def test_losses_of_a_job_that_moves_and_returns_are_those_of_one_that_never_moved(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Four replicas, then two that accumulate, then four: the global batch is the same on each."""
    checkpoint = {"uri": str(tmp_path / "checkpoints"), "everySteps": FIRST, "keep": 1}
    losses: list[float] = []
    for hosts, steps, accumulation in ((4, FIRST, 1), (2, 17, 2), (4, STEPS, 1)):
        spec = run_spec(hosts=hosts, replicas=hosts, warmupSteps=0, trainSteps=steps, checkpoint=checkpoint)
        spec["batch"] = {"global": BATCH, "perReplica": BATCH // hosts // accumulation, "accumulation": accumulation}
        run = launcher.start(spec)
        assert set(run.wait()) == {0}, run.output()
        losses += run.losses()
    assert losses[FIRST:] == pytest.approx(by_hand(BATCH, RATE, STEPS, []), abs=1e-5)
