"""What crosses between replicas in a step, and what the loop learns from the summed signals, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.in_threads import ThreadBackend, in_threads
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.gang.exchange import MOST_STEPS, Flags, Loss, Signals, Sums, exchange, take_gradients


def parameters(*gradients: list[float] | None) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(2)) for _ in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return made


def test_the_exchange_takes_the_gradients_off_the_parameters() -> None:
    own = parameters([1.0, 2.0], [3.0, 4.0])
    gradients, signals = take_gradients(own, Loss(torch.tensor(0.5)), torch.tensor([[1.0, 1.0, 1.0]]))
    assert [gradient.tolist() for gradient in gradients] == [[1.0, 2.0], [3.0, 4.0]]
    assert signals.tolist() == [0.5, 1.0, 1.0, 1.0]
    assert [parameter.grad for parameter in own] == [None, None]


def test_the_requests_of_a_program_of_several_devices_are_the_mean_of_their_rows() -> None:
    two_devices = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    _, signals = take_gradients([], Loss(torch.tensor(0.5)), two_devices)
    assert signals.tolist() == [0.5, 1.0, 0.5, 0.0]


def test_a_loss_with_a_weight_keeps_it() -> None:
    _, signals = take_gradients([], Loss(torch.tensor(6.0), torch.tensor(3.0)), torch.tensor([[1.0, 0.0, 1.0]]))
    assert signals.tolist() == [6.0, 3.0, 0.0, 1.0]


def test_the_requests_of_a_replica_are_one_input_of_the_program() -> None:
    flags = Flags(in_threads(1, lambda backend: backend)[0])
    asked = [flags.requests(stop=stop, save=save) for stop in (False, True) for save in (False, True)]
    assert [each.tolist() for each in asked] == [
        [[1.0, 0.0, 0.0]],
        [[1.0, 0.0, 1.0]],
        [[1.0, 1.0, 0.0]],
        [[1.0, 1.0, 1.0]],
    ]


def sums_of(*gradients: list[float] | None) -> list[Sums]:
    """What each replica learns; replica n has the nth gradient."""

    def replica(backend: ThreadBackend) -> Sums:
        quiet = torch.tensor([[1.0, 0.0, 0.0]])
        return exchange(parameters(gradients[backend.rank]), Loss(torch.tensor(0.5)), quiet, backend)

    return in_threads(len(gradients), replica)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_gradients_of_one_replica_that_are_not_finite_or_too_long_are_known_to_all(bad: float) -> None:
    assert [bool(sums.finite(ON_CPU)) for sums in sums_of([1.0, 2.0], [bad, 4.0])] == [False, False]


def test_infinite_gradients_of_two_signs_do_not_cancel() -> None:
    assert [bool(sums.finite(ON_CPU)) for sums in sums_of([math.inf, 2.0], [-math.inf, 4.0])] == [False, False]


@pytest.mark.parametrize(
    ("loss", "weight", "norm", "finite"),
    [
        (6.0, 2.0, 1.0, True),
        (-6.0, -2.0, 1.0, True),
        (6.0, -2.0, 1.0, True),
        (0.0, 2.0, 0.0, True),
        (6.0, 0.0, 1.0, False),
        (0.0, 0.0, 0.0, False),
        (math.nan, 2.0, 1.0, False),
        (math.inf, 2.0, 1.0, False),
        (6.0, math.nan, 1.0, False),
        (6.0, math.inf, 0.0, False),
        (6.0, 2.0, math.nan, False),
        (6.0, 2.0, math.inf, False),
    ],
)
def test_a_step_that_is_skipped_on_the_device_is_one_that_is_told_as_not_finite(
    loss: float, weight: float, norm: float, finite: bool
) -> None:
    sums = summed(loss, weight, norm=norm)
    made = Signals(Device(reads_free=True), step=0)
    made.add(sums)
    assert (bool(sums.finite(ON_CPU)), made.read(0, all_steps=True).finite) == (finite, (finite,))


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (torch.empty((), device="meta"), "the task's loss is on meta"),
        ((torch.empty((), device="meta"), torch.tensor(1.0)), "the task's loss is on meta"),
        ((torch.tensor(1.0), torch.empty((), device="meta")), "of the task's loss is on meta"),
    ],
)
def test_a_loss_on_another_device_is_the_users_error(returned: Any, named: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        Loss.of(returned, 1, torch.device("cpu"))
    assert named in str(caught.value)


def test_the_norm_is_that_of_the_mean_gradient() -> None:
    first, second = sums_of([2.0, 0.0], [4.0, 8.0])
    assert (float(first.norm), float(second.norm), bool(first.finite(ON_CPU))) == (5.0, 5.0, True)


def test_without_any_gradient_the_norm_is_0() -> None:
    assert [float(sums.norm) for sums in sums_of(None, None)] == [0.0, 0.0]


class Device:
    """As much of a backend as signals need: two replicas; one takes `slowest` seconds for a step."""

    terms = 2
    device = torch.device("cpu")

    def __init__(self, reads_free: bool, slowest: float = 0.0) -> None:
        self.reads_free, self._slowest = reads_free, slowest

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [list(row), [self._slowest]]


ON_CPU = Device(reads_free=True)


def signals(*sums: list[float], **device: Any) -> Signals:
    made = Signals(Device(**device), step=0)
    for total, stop in sums:
        made.add(summed(total, stop=stop))
    return made


def summed(
    loss: float, weight: float = 2.0, stop: float = 0.0, save: float = 0.0, norm: float = 1.0, **more: Any
) -> Sums:
    """What a step of two replicas has summed."""
    return Sums(torch.tensor([loss, weight, stop, save]), torch.tensor(norm), **more)


def with_square(own: float, whole: float, **more: Any) -> Sums:
    """With the sum of the replicas' own squares, and the square of the global gradient."""
    sums = summed(2.0, square=torch.tensor(whole), **more)
    return replace(sums, signals=torch.cat([sums.signals, torch.tensor([own])]))


def test_a_loss_is_the_mean_over_the_replicas() -> None:
    assert signals([6.0, 0.0], [4.0, 0.0], reads_free=True).read(0, all_steps=False).losses == (3.0, 2.0)


def test_one_replicas_wish_to_stop_stops_all() -> None:
    assert signals([6.0, 0.0], [4.0, 1.0], reads_free=True).read(0, all_steps=False).stopping
    assert not signals([6.0, 0.0], reads_free=True).read(0, all_steps=False).stopping


def test_on_a_device_that_works_ahead_the_newest_step_waits_for_the_next_reading() -> None:
    made = signals([2.0, 0.0], [4.0, 0.0], reads_free=False)
    assert (made.read(0, all_steps=False).losses, made.read_through) == ((1.0,), 1)
    assert made.read(0, all_steps=False) is None
    assert (made.read(0, all_steps=True).losses, made.read_through) == ((2.0,), 2)


def test_a_reading_that_stops_the_run_covers_all_steps() -> None:
    reading = signals([2.0, 1.0], [4.0, 1.0], reads_free=False).read(0, all_steps=False)
    assert (reading.losses, reading.stopping) == ((1.0, 2.0), True)


def test_a_reading_that_asks_for_a_checkpoint_covers_all_steps() -> None:
    made = signals(reads_free=False)
    made.add(summed(2.0, save=1.0))
    made.add(summed(4.0))
    reading = made.read(0, all_steps=False)
    assert (reading.losses, reading.saving, reading.stopping) == ((1.0, 2.0), True, False)


@pytest.mark.parametrize(
    ("step", "loss", "finite"),
    [
        (summed(6.0, weight=4.0), 1.5, True),
        (summed(math.inf), math.inf, False),
        (summed(6.0, norm=math.nan), 3.0, False),
        (summed(6.0, norm=math.inf), 3.0, False),
        (summed(0.0, weight=0.0), math.nan, False),
        (summed(6.0, weight=math.inf), math.nan, False),
        (summed(6.0, weight=-2.0), -3.0, True),
    ],
)
def test_a_step_is_finite_if_its_loss_and_its_gradient_are(step: Sums, loss: float, finite: bool) -> None:
    made = signals(reads_free=True)
    made.add(step)
    reading = made.read(0, all_steps=True)
    assert reading.losses == pytest.approx((loss,), nan_ok=True)
    assert (reading.finite, bool(step.finite(ON_CPU))) == ((finite,), finite)


@pytest.mark.parametrize(("seconds", "every"), [(0.001, MOST_STEPS), (0.3, 3), (5.0, 1)])
def test_the_slowest_replica_decides_how_many_steps_are_read_at_once(seconds: float, every: int) -> None:
    made = signals(reads_free=False, slowest=seconds)
    made.settle_interval(0.0005)
    read = []
    for step in range(1, 2 * every + 1):
        made.add(summed(1.0))
        made.add(summed(1.0))
        read += [step] if made.read(step, all_steps=False) else []
    assert read == [every, 2 * every]


def test_a_reading_pairs_the_mean_square_of_replicas_gradients_with_the_global_one() -> None:
    made = Signals(Device(reads_free=True), step=0)
    made.add(with_square(8.0, 3.0))
    assert made.read(0, all_steps=False).squares == ((4.0, 3.0),)


def test_a_reading_has_each_steps_gradient_norm_with_and_without_the_noise_scale() -> None:
    made = Signals(Device(reads_free=True), step=0)
    made.add(with_square(8.0, 9.0, norm=3.0))
    reading = made.read(0, all_steps=False)
    assert (reading.squares, reading.norms) == (((4.0, 9.0),), (3.0,))
    made.add(summed(2.0, norm=5.0))
    assert made.read(0, all_steps=False).norms == (5.0,)
