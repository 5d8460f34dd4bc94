"""Prints how many programs an XLA device still had to run when the barrier had returned. Run by `test_backends`."""

from __future__ import annotations

import torch
import torch_xla.core.xla_model as xm
from torch_xla.debug import metrics

from tpu_trainer.gang.backends.group import ProcessGroup
from tpu_trainer.gang.backends.xla import XlaHost


def ended() -> int:
    """Returns how many programs have run to their end. torch_xla counts each at that moment."""
    return (metrics.metric_data("ExecuteTime") or (0,))[0]


def main() -> None:
    backend = XlaHost(ProcessGroup(0, 1))
    # A tenth of a second for each of the three programs, on any machine.
    large = backend.send(torch.full((1200, 1200), 1e-3))
    for _ in range(3):
        large = large @ large
        backend.sync()
    backend.barrier()
    before = ended()
    xm.wait_device_ops()
    print("unfinished:", ended() - before, "of", ended())


if __name__ == "__main__":
    main()
