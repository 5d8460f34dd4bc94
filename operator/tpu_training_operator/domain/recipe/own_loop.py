"""What a loop of the user's own (`trainer.command`) does not get by itself, and should be known before it runs."""

from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.trainer import Backend

YOURS = "left to your command"
"""Said of what only the trainer would do."""

NOTE = (
    "your command trains: it finds these numbers in TPUJOB_* variables and in the JSON file that TPUJOB_RUN_SPEC names,"
    " and nothing applies them for it"
)


def warnings(spec: Spec, hosts: int) -> list[str]:
    """Why the hosts of this job would not train one model; empty where they do."""
    trainer = spec.trainer
    if trainer.command is None or hosts == 1 or spec.slice.hardware is not Hardware.CPU:
        return []
    if trainer.backend is Backend.TORCH:
        return []
    return [
        f"each of the {hosts} hosts trains a model of its own: on hardware CPU torch_xla has no collectives between"
        " hosts, and trainer.command is not joined by the trainer; with backend Torch, torchrun joins them"
    ]
