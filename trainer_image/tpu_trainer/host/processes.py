"""A host whose replicas are processes of their own, one per device, supervised from here.

Two things start them: torch_xla.launch on TPU (`chips`), and `torch_launch` for the torch backend. What a supervisor
owes is the same. One replica that fails would leave the others in a collective that never ends, so it writes its
outcome down and ends its process at once, and the rest are stopped. A request to stop reaches the supervisor only; a
file carries it on. And the store at which all processes meet is kept here on host 0, so that it outlives any of them.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from tpu_trainer.backends.rendezvous import serve
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.host.one_process import read_outcomes, stop_file
from tpu_trainer.outcome import Outcome, host_outcome
from tpu_trainer.spec import RunSpec
from tpu_trainer.stop import StopSignal


def run_processes(spec: RunSpec, environment: WorkerEnvironment, stop: StopSignal) -> Outcome:
    """Runs one replica per device of this host and returns the host's outcome.

    Raises:
        PeerLostError: the store could not be opened at MASTER_ADDR:MASTER_PORT.
        BadSpecError: the devices found are not those the run spec speaks of.
    """
    if spec.backend == "torch":
        from tpu_trainer.host.torch_launch import launch
    else:
        from tpu_trainer.host.chips import launch

    with tempfile.TemporaryDirectory(prefix="tpu-trainer-") as directory:
        folder = Path(directory)
        stop.share(stop_file(folder))
        try:
            if environment.num_hosts == 1:
                environment = replace(environment, master_addr="localhost", master_port=0)
            # Held until the last process has ended.
            kept = serve(environment, spec.job.gang, spec.slice.replicas) if environment.host_index == 0 else None
            if kept is not None:
                environment = replace(environment, master_port=kept.port)
            died = launch(spec, environment, folder)
        finally:
            stop.unshare()
        return host_outcome(read_outcomes(folder), died)
