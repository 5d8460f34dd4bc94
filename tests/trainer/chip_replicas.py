"""`python -m tpu_trainer` for the process-per-chip path, on XLA's CPU device in place of chips.

XLA:CPU pairs up replicas for a collective by the module's own id unless the operation has a channel id, and
xm.all_reduce gives it none; every replica compiles its own module, so they never meet and XLA aborts after ten
seconds. The binding used here emits the same HLO all-reduce with a channel id. Nothing else is replaced: launch,
ordinals, placement, broadcast, the loop and the flat bucket are those of a TPU run.

The patch stands at import, because the started processes import this module anew.
"""

from __future__ import annotations

import sys
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from tpu_trainer.entry import main


def all_reduce_on_cpu(kind: str, flat: Any) -> Any:
    """The one form in which the trainer calls xm.all_reduce: a sum of one flat tensor over all replicas."""
    assert flat.dim() == 1
    return torch_xla._XLAC._xla_spmd_all_reduce(kind, flat, 1.0, [list(range(xr.world_size()))])


xm.all_reduce = all_reduce_on_cpu

if __name__ == "__main__":
    sys.exit(main())
