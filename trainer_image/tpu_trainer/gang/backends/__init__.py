"""The ways replicas can run and meet. The rest of the trainer sees the protocol only."""

from __future__ import annotations

from collections.abc import Callable

from tpu_contract.run_spec import RunSpec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.stop import StopFlag
from tpu_trainer.gang.backends.base import Backend

__all__ = ["Backend", "open_backend"]


def open_backend(
    spec: RunSpec, environment: WorkerEnvironment, stop: StopFlag, imported: Callable[[], None] = lambda: None
) -> Backend:
    """Joins the gang and returns this process's backend. `imported`: called once the device's libraries are imported.

    Raises:
        PeerLostError: the other processes did not come within the rendezvous' time.
        PreemptedError: asked to stop before the gang had formed.
        BadSpecError: the devices found are not the run spec's.
    """
    # Imported when chosen: torch_xla takes seconds to load, and a laptop without it runs the other backend.
    from tpu_trainer.gang.backends.rendezvous import Seat, begin_meeting, join, meet

    gang, on_cpu = spec.job.gang, spec.hardware == "CPU"
    if spec.backend == "torch":
        from tpu_trainer.gang.backends.torch_dist import TorchDistributed, find_device

        imported()
        settings, local_rank = spec.torch, environment.local_rank
        device = find_device(settings, local_rank)
        seat = Seat.of_local(environment, local_rank, settings.processes_per_host) if spec.process_per_device else None
        group = join(environment, gang, stop, seat=seat, device=settings.device, collectives=settings.collectives)
        return TorchDistributed(group, device, local_rank, settings.execution)

    from tpu_trainer.gang.backends.torch_xla_import import import_torch_xla

    # A process per chip learns its seat from the chips.
    meeting = begin_meeting(environment, gang, stop) if spec.backend == "xla-spmd" or on_cpu else None
    import_torch_xla()
    from tpu_trainer.gang.backends.xla import XlaChip, XlaHost, XlaSpmd

    imported()
    if spec.backend == "xla-spmd":
        XlaSpmd.start(virtual_devices=spec.slice.replicas if on_cpu else None)
        return XlaSpmd(join(environment, gang, stop, meeting=meeting), expected_replicas=spec.slice.replicas)
    if on_cpu:
        return XlaHost(join(environment, gang, stop, meeting=meeting))
    chip = XlaChip(expected_replicas=spec.slice.replicas)
    seat = Seat.of_local(environment, chip.local_rank, per_host=chip.world // environment.num_hosts)
    chip.store = meet(environment, gang, stop, seat)
    return chip
