"""The slice check with a replica for each chip, on the stand-ins of `chip_replicas`, which have no device files."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from tests.trainer import chip_replicas
from tpu_trainer.checks.slice import chips, pod
from tpu_trainer.checks.slice.chips import Effort
from tpu_trainer.checks.slice.command import main

assert chip_replicas
pod._check_devices = lambda *_: iter(())
# A CPU in place of a chip takes minutes for a chip's measurement.
chips.SIZES = (1 << 10, 1 << 16)
chips.Effort = lambda *_: Effort(64, 4, 1, 0.05)  # type: ignore[misc]


def once(work: Callable[[], object], *_: object) -> tuple[float, float]:
    """The stand-ins of a host sync together, so all must do it as often; chips count by the clock."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began, 1.0


chips._pace = once

if __name__ == "__main__":
    sys.exit(main([os.environ["TEST_SLICE_CHECK"]]))
