"""`python -m tpu_trainer` that ends with an error if a gradient is still alive when a step is sent to the device.

On XLA such a gradient becomes an output of the compiled step. Here the eager backend stands in, for what decides is
whether any name in the loop still refers to it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpu_trainer.gang.backends.torch_dist import TorchDistributed
from tpu_trainer.worker.entry import main

if TYPE_CHECKING:
    from torch import Tensor

_seen: list[weakref.ref[Tensor]] = []
_reduce = TorchDistributed.reduce


def remembering(self: TorchDistributed, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
    sums, total = _reduce(self, gradients, signals)
    _seen.extend(weakref.ref(tensor) for tensor in (*gradients, *sums))
    return sums, total


def checking(self: TorchDistributed) -> None:
    alive = sum(reference() is not None for reference in _seen)
    assert alive == 0, f"{alive} of {len(_seen)} gradients are alive at the sync"
    _seen.clear()


TorchDistributed.reduce = remembering
TorchDistributed.sync = checking

if __name__ == "__main__":
    sys.exit(main())
