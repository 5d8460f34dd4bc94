"""What crosses between replicas in a step, and what the loop learns from the summed signals, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tpu_trainer.exchange import BROKEN, MOST_STEPS, Loss, Signals, Sums, Wishes, take


def parameters(*gradients: list[float] | None) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return made


def test_the_exchange_takes_the_gradients_off_the_parameters() -> None:
    own = parameters([1.0, 2.0], [3.0, 4.0])
    wishes = Wishes(stop=torch.tensor([1.0]), save=torch.tensor([0.0, 1.0]))
    gradients, signals = take(own, Loss(torch.tensor(0.5)), wishes)
    assert [gradient.tolist() for gradient in gradients] == [[1.0, 2.0], [3.0, 4.0]]
    assert signals.tolist() == [0.5, 1.0, 1.0, 1.0, 0.0]
    assert [parameter.grad for parameter in own] == [None, None]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_are_signalled(bad: float) -> None:
    quiet = Wishes(stop=torch.zeros(1), save=torch.zeros(1))
    _, signals = take(parameters([1.0, 2.0], [bad, 4.0]), Loss(torch.tensor(0.5)), quiet)
    assert signals[BROKEN] == 1
    assert not Sums(signals).finite


class Device:
    """As much of a backend as signals need: two replicas; one takes `slowest` seconds for a step."""

    terms = 2

    def __init__(self, reads_free: bool, slowest: float = 0.0) -> None:
        self.reads_free, self._slowest = reads_free, slowest

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [list(row), [self._slowest]]


def signals(*sums: list[float], **device: Any) -> Signals:
    made = Signals(Device(**device), step=0)
    for total, stop in sums:
        made.add(Sums(summed(total, stop=stop)))
    return made


def summed(loss: float, weight: float = 2.0, stop: float = 0.0, save: float = 0.0, broken: float = 0.0) -> Tensor:
    """A step's signals, summed over two replicas."""
    return torch.tensor([loss, weight, stop, save, broken])


def test_a_loss_is_the_mean_over_the_replicas() -> None:
    assert signals([6.0, 0.0], [4.0, 0.0], reads_free=True).read(0, whole=False).losses == (3.0, 2.0)


def test_one_replicas_wish_to_stop_stops_all() -> None:
    assert signals([6.0, 0.0], [4.0, 1.0], reads_free=True).read(0, whole=False).stopping
    assert not signals([6.0, 0.0], reads_free=True).read(0, whole=False).stopping


def test_on_a_device_that_works_ahead_the_newest_step_waits_for_the_next_reading() -> None:
    made = signals([2.0, 0.0], [4.0, 0.0], reads_free=False)
    assert (made.read(0, whole=False).losses, made.read_through) == ((1.0,), 1)
    assert made.read(0, whole=False) is None
    assert (made.read(0, whole=True).losses, made.read_through) == ((2.0,), 2)


def test_a_reading_that_stops_the_run_covers_all_steps() -> None:
    reading = signals([2.0, 1.0], [4.0, 1.0], reads_free=False).read(0, whole=False)
    assert (reading.losses, reading.stopping) == ((1.0, 2.0), True)


def test_a_reading_that_asks_for_a_checkpoint_covers_all_steps() -> None:
    made = signals(reads_free=False)
    made.add(Sums(summed(2.0, save=1.0)))
    made.add(Sums(summed(4.0)))
    reading = made.read(0, whole=False)
    assert (reading.losses, reading.saving, reading.stopping) == ((1.0, 2.0), True, False)


@pytest.mark.parametrize(
    ("step", "loss", "finite"),
    [
        (summed(6.0, weight=4.0), 1.5, True),
        (summed(math.inf), math.inf, False),
        (summed(6.0, broken=1.0), 3.0, False),
        (summed(0.0, weight=0.0), math.nan, False),
    ],
)
def test_a_step_is_finite_if_its_loss_and_all_replicas_gradients_are(step: Tensor, loss: float, finite: bool) -> None:
    made = signals(reads_free=True)
    made.add(Sums(step))
    reading = made.read(0, whole=True)
    assert reading.losses == pytest.approx((loss,), nan_ok=True)
    assert reading.finite == (finite,)


@pytest.mark.parametrize(("seconds", "every"), [(0.001, MOST_STEPS), (0.3, 3), (5.0, 1)])
def test_the_slowest_replica_decides_how_many_steps_are_read_at_once(seconds: float, every: int) -> None:
    made = signals(reads_free=False, slowest=seconds)
    made.settle_interval(0.0005)
    read = []
    for step in range(1, 2 * every + 1):
        made.add(Sums(summed(1.0)))
        made.add(Sums(summed(1.0)))
        read += [step] if made.read(step, whole=False) else []
    assert read == [every, 2 * every]


def test_a_reading_pairs_the_mean_square_of_replicas_gradients_with_the_global_one() -> None:
    made = Signals(Device(reads_free=True), step=0)
    made.add(Sums(torch.cat([summed(2.0), torch.tensor([8.0])]), square=torch.tensor(3.0)))
    assert made.read(0, whole=False).squares == ((4.0, 3.0),)


def test_a_reading_has_each_steps_gradient_norm_with_and_without_the_noise_scale() -> None:
    made = Signals(Device(reads_free=True), step=0)
    made.add(Sums(torch.cat([summed(2.0), torch.tensor([8.0])]), square=torch.tensor(9.0), norm=torch.tensor(3.0)))
    reading = made.read(0, whole=False)
    assert (reading.squares, reading.norms) == (((4.0, 9.0),), (3.0,))
    made.add(Sums(summed(2.0), norm=torch.tensor(5.0)))
    assert made.read(0, whole=False).norms == (5.0,)
