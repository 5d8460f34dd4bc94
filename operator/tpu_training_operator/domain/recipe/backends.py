"""What a backend needs of the slice that only the catalogue knows: hosts and replicas."""

from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.trainer import Backend
from tpu_training_operator.api.validation import Problem
from tpu_training_operator.domain.topology import SliceLayout


def problems(spec: Spec, layout: SliceLayout) -> list[Problem]:
    """Why the backend cannot run on this layout; empty where it can."""
    found: list[Problem] = []
    backend, torch = spec.trainer.backend, spec.trainer.torch
    if backend is Backend.XLA_SPMD and spec.slice.hardware is Hardware.CPU and layout.hosts > 1:
        message = (
            f"XLASPMD on hardware CPU runs on one host, not on {layout.hosts}: XLA's CPU client has no collectives"
            " between processes; rehearse with XLA or Torch, or on a slice of one host"
        )
        found.append(Problem("spec.trainer.backend", message))
    replicas_per_host = layout.replicas // layout.hosts
    if torch is not None and replicas_per_host % torch.processes_per_host:
        fitting = [str(count) for count in range(1, replicas_per_host + 1) if replicas_per_host % count == 0]
        message = (
            f"the {replicas_per_host} replicas of a host do not divide over {torch.processes_per_host} processes;"
            f" possible here: {', '.join(fitting)}"
        )
        found.append(Problem("spec.trainer.torch.processesPerHost", message))
    return found
