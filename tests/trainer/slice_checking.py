"""`python -m tpu_trainer slice-check MODE` with a fault on one host: TEST_SLICE_CHECK is "MODE FAULT HOST"."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.trainer.forked_replicas import forking
from tpu_trainer.checks.slice import chips, command, network
from tpu_trainer.checks.slice.chips import Effort
from tpu_trainer.gang.backends import Backend, rendezvous
from tpu_trainer.gang.backends.torch_dist import TorchDistributed

reduce, multiply = TorchDistributed.reduce, torch.Tensor.__matmul__
measure_product, held_seconds, check_network = chips._measure_product, chips._held_seconds, network.check_network
pace = chips._pace

Sums = tuple[list[Tensor], Tensor]


def with_a_wrong_part(self: TorchDistributed, gradients: Sequence[Tensor], signals: Tensor) -> Sums:
    """This rank's part of every sum is twice what it should be."""
    return reduce(self, [gradient * 2 for gradient in gradients], signals)


def with_a_wrong_result(self: TorchDistributed, gradients: Sequence[Tensor], signals: Tensor) -> Sums:
    """One element of every sum comes out wrong on this rank."""
    sums, total = reduce(self, gradients, signals)
    sums[0][..., 3] += 1.0
    return sums, total


def wrongly(left: Tensor, right: Tensor) -> Tensor:
    return multiply(left, right) + 1.0


def slowly(left: Tensor, right: Tensor) -> Tensor:
    """Takes a hundred times as much CPU time as any other host's product."""
    until = time.process_time() + 0.01
    while time.process_time() < until:
        multiply(left, right)
    return multiply(left, right)


def briefly(work: Callable[[], object], effort: Effort, until: float) -> tuple[float, float]:
    """Measures for a quarter of the time: no fault of the tests comes and goes."""
    return pace(work, replace(effort, seconds=effort.seconds / 4), until)


def throttled(backend: Backend, effort: Effort, until: float) -> tuple[float, float, float]:
    """Measures in the cgroup that the test has made, as a host that is slowed by its cgroup does."""
    Path(os.environ["TEST_CGROUP"]).write_text(str(os.getpid()))
    return measure_product(backend, effort, until)


def free_again() -> float:
    """Reads for how long the cgroup has held this process back, and leaves it: so the test ends sooner."""
    seconds, slow = held_seconds(), Path(os.environ["TEST_CGROUP"])
    (slow.parents[1] / slow.name).write_text(str(os.getpid()))
    return seconds


def after_all_time(*args: Any) -> Any:
    """Finds the network only when the time of the fast half is over."""
    command.FAST_SECONDS = 0.0
    return check_network(*args)


def inject(fault: str) -> None:
    match fault:
        case "part":
            TorchDistributed.reduce = with_a_wrong_part
        case "result":
            TorchDistributed.reduce = with_a_wrong_result
        case "product":
            torch.Tensor.__matmul__ = wrongly
        case "slow":
            torch.Tensor.__matmul__ = slowly
        case "throttled":
            chips._measure_product, chips._held_seconds = throttled, free_again
        case "late":
            command.check_network = after_all_time
        case "hang":
            chips._measure_product = lambda *_: time.sleep(3600)
        case "port":
            # It listens, and takes no connection.
            network._Answering._answer = lambda self: None
        case "away":
            os._exit(9)


if __name__ == "__main__":
    mode, fault, host, *_ = [*os.environ["TEST_SLICE_CHECK"].split(), "", "-1"]
    if host == os.environ["TPUJOB_HOST_INDEX"]:
        inject(fault)
    if seconds := os.environ.get("TEST_MEETING_SECONDS"):
        rendezvous.meet = functools.partial(rendezvous.meet, seconds=float(seconds))
    if seconds := os.environ.get("TEST_COME_SECONDS"):
        command.COME_SECONDS, command.PHASE_SECONDS = float(seconds), 2 * float(seconds)
    chips._pace = briefly
    with forking():
        sys.exit(command.main([mode]))
