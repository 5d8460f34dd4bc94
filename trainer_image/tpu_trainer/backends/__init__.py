"""The ways replicas can run and meet. `open_backend` picks one; the rest of the trainer sees the protocol only."""

from __future__ import annotations

from tpu_trainer.backends.base import Backend
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.spec import RunSpec
from tpu_trainer.stop import StopFlag

__all__ = ["Backend", "open_backend"]


def open_backend(spec: RunSpec, environment: WorkerEnvironment, stop: StopFlag) -> Backend:
    """Joins the gang and returns this process's backend.

    On hardware TPU this is called in each chip's own process, started by `chips`.

    Raises:
        PeerLostError: the other hosts did not come within the rendezvous' time.
        PreemptedError: told to stop before the gang had formed.
        BadSpecError: the chips found are not those the run spec speaks of.
    """
    # Imported as chosen: torch_xla takes seconds, and a laptop without it can still run backend torch.
    if spec.backend == "xla" and spec.hardware == "TPU":
        from tpu_trainer.backends.xla import XlaChip

        return XlaChip(expected_replicas=spec.slice.replicas)
    from tpu_trainer.backends.rendezvous import join

    group = join(environment, f"{spec.job.uid}/{spec.job.attempt}", stop)
    if spec.backend == "xla":
        from tpu_trainer.backends.xla import XlaHost

        return XlaHost(group)
    from tpu_trainer.backends.torch_dist import TorchDistributed

    return TorchDistributed(group)
