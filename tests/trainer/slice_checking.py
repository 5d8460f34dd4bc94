"""`python -m tpu_trainer slice-check MODE` with a fault on one host: TEST_SLICE_CHECK is "MODE FAULT HOST"."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tpu_trainer.checks.slice import chips, network, probe
from tpu_trainer.checks.slice.chips import Effort
from tpu_trainer.checks.slice.command import main
from tpu_trainer.gang.backends import Backend, rendezvous
from tpu_trainer.gang.backends.torch_dist import TorchDistributed

reduce, multiply = TorchDistributed.reduce, torch.Tensor.__matmul__
measure_product = chips._measure_product

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
    # Longer than any other host would take on a loaded machine.
    time.sleep(1.0)
    return multiply(left, right)


def throttled(backend: Backend, effort: Effort) -> tuple[float, float]:
    """Measures the product in the cgroup that the test has made, as a host that is slowed by its cgroup does."""
    slow = Path(os.environ["TEST_CGROUP"])
    slow.write_text(str(os.getpid()))
    try:
        return measure_product(backend, effort)
    finally:
        (slow.parents[1] / slow.name).write_text(str(os.getpid()))


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
            chips._measure_product = throttled
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
        probe.COME_SECONDS, probe.PHASE_SECONDS = float(seconds), 2 * float(seconds)
    sys.exit(main([mode, *sys.argv[1:]]))
