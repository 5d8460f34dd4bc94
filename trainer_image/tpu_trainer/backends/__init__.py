"""The ways replicas can run and meet. `open_backend` picks one; the rest of the trainer sees the protocol only."""

from __future__ import annotations

from tpu_trainer.backends.base import Backend
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.spec import RunSpec
from tpu_trainer.stop import StopFlag

__all__ = ["Backend", "open_backend"]


def open_backend(spec: RunSpec, environment: WorkerEnvironment, stop: StopFlag) -> Backend:
    """Joins the gang and returns this process's backend.

    Called in the host's own process, or in each of those that `processes` starts.

    Raises:
        PeerLostError: the other processes did not come within the rendezvous' time.
        PreemptedError: told to stop before the gang had formed.
        BadSpecError: the devices found are not those the run spec speaks of.
    """
    gang = spec.job.gang
    if spec.backend == "torch":
        return _torch(spec, environment, gang, stop)
    if spec.backend == "xla-spmd":
        return _spmd(spec, environment, gang, stop)
    return _xla(spec, environment, gang, stop)


# What a backend is made of is imported as chosen: torch_xla takes seconds, and a laptop without it can run the others.


def _torch(spec: RunSpec, environment: WorkerEnvironment, gang: str, stop: StopFlag) -> Backend:
    from tpu_trainer.backends.rendezvous import Seat, join
    from tpu_trainer.backends.torch_device import find_device
    from tpu_trainer.backends.torch_dist import TorchDistributed

    chosen, local_rank = spec.torch, environment.local_rank
    device = find_device(chosen, local_rank)
    seat = Seat.of_local(environment, local_rank, chosen.processes_per_host) if spec.process_per_device else None
    group = join(environment, gang, stop, seat=seat, device=chosen.device, collectives=chosen.collectives)
    return TorchDistributed(group, device, local_rank)


def _spmd(spec: RunSpec, environment: WorkerEnvironment, gang: str, stop: StopFlag) -> Backend:
    from tpu_trainer.backends.rendezvous import join
    from tpu_trainer.backends.spmd import XlaSpmd, start_spmd

    start_spmd(virtual_devices=spec.slice.replicas if spec.hardware == "CPU" else None)
    return XlaSpmd(join(environment, gang, stop), expected_replicas=spec.slice.replicas)


def _xla(spec: RunSpec, environment: WorkerEnvironment, gang: str, stop: StopFlag) -> Backend:
    from tpu_trainer.backends.rendezvous import Seat, join, meet
    from tpu_trainer.backends.xla import XlaChip, XlaHost

    if spec.hardware == "CPU":
        return XlaHost(join(environment, gang, stop))
    chip = XlaChip(expected_replicas=spec.slice.replicas)
    seat = Seat.of_local(environment, chip.local_rank, per_host=chip.world // environment.num_hosts)
    chip.store = meet(environment, gang, stop, seat)
    return chip
