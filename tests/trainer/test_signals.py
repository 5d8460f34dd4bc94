"""What the loop learns from the summed signals, and when: the newest step is left out where the device works ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tpu_trainer.signals import MOST_STEPS, Signals


class Device:
    """As much of a backend as signals need: two replicas, one of which takes `slowest` seconds for a step."""

    terms = 2

    def __init__(self, reads_free: bool, slowest: float = 0.0) -> None:
        self.reads_free, self._slowest = reads_free, slowest

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [list(row), [self._slowest]]


def signals(*sums: list[float], **device: Any) -> Signals:
    made = Signals(Device(**device), step=0)
    for step in sums:
        made.add(torch.tensor(step), None)
    return made


def test_losses_are_means_over_the_replicas() -> None:
    assert signals([6.0, 0.0], [4.0, 0.0], reads_free=True).read(whole=False).losses == (3.0, 2.0)


def test_any_replicas_wish_to_stop_is_everybodys() -> None:
    assert signals([6.0, 0.0], [4.0, 1.0], reads_free=True).read(whole=False).stopping
    assert not signals([6.0, 0.0], reads_free=True).read(whole=False).stopping


def test_where_the_device_works_ahead_the_newest_step_waits_for_the_next_reading() -> None:
    made = signals([2.0, 0.0], [4.0, 0.0], reads_free=False)
    assert (made.read(whole=False).losses, made.read_through) == ((1.0,), 1)
    assert made.read(whole=False) is None
    assert (made.read(whole=True).losses, made.read_through) == ((2.0,), 2)


def test_a_reading_that_stops_the_run_is_of_all_steps() -> None:
    reading = signals([2.0, 1.0], [4.0, 1.0], reads_free=False).read(whole=False)
    assert (reading.losses, reading.stopping) == ((1.0, 2.0), True)


@pytest.mark.parametrize(("seconds", "every"), [(0.001, MOST_STEPS), (0.3, 3), (5.0, 1)])
def test_the_slowest_replica_decides_how_many_steps_are_read_at_once(seconds: float, every: int) -> None:
    made = signals(reads_free=False, slowest=seconds)
    made.settle_interval(0.0005)
    assert [step for step in range(1, 2 * every + 1) if made.due(step)] == [every, 2 * every]


def test_squares_of_gradients_come_with_the_means_of_the_replicas_own() -> None:
    made = Signals(Device(reads_free=True), step=0)
    made.add(torch.tensor([2.0, 0.0, 8.0]), torch.tensor(3.0))
    assert made.read(whole=False).squares == ((4.0, 3.0),)
