"""The run spec as the trainer holds it: read once at the start, never changed. Made by `spec.parser`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class JobRef:
    """Which run of which job this is; `uid` and `attempt` together name one gang."""

    namespace: str
    name: str
    uid: str
    attempt: int

    @property
    def gang(self) -> str:
        return f"{self.uid}/{self.attempt}"


@dataclass(frozen=True)
class Slice:
    """The hardware the recipe was scaled to; `hosts` and `replicas` count the whole job, all slices together."""

    generation: str
    topology: str
    slices: int
    hosts: int
    replicas: int


@dataclass(frozen=True)
class Batch:
    """Examples per step of the whole job; a replica takes `per_replica` of them at once, `accumulation` times."""

    total: int
    per_replica: int
    accumulation: int


@dataclass(frozen=True)
class ScheduleSpec:
    """The learning rate after warm-up; `milestones` are steps, `factor` None where the recipe is silent."""

    name: str
    milestones: tuple[int, ...]
    factor: float | None


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer's name and the values the recipe gives it; None where the recipe is silent."""

    name: str
    learning_rate: float
    momentum: float | None
    weight_decay: float | None
    beta1: float | None
    beta2: float | None
    epsilon: float | None


@dataclass(frozen=True)
class TorchSpec:
    """What the torch backend runs on: a torch device type, the process group's backend, and processes per host.

    ("cpu", "gloo") is the default; ("cuda", "nccl") is GPUs, ("tpu", "tpu_dist") is TorchTPU.
    """

    device: str = "cpu"
    collectives: str = "gloo"
    processes_per_host: int = 1


@dataclass(frozen=True)
class CheckpointSpec:
    """Where checkpoints go and how often; of steps and minutes, the one that is due first counts.

    With neither there is a checkpoint only when the run is stopped or ends. `keep` is how many committed ones stay.
    `uri` is a folder of this job alone; `resume_from` is where it begins while that holds nothing of its own.
    """

    uri: str
    every_steps: int | None
    every_minutes: int | None
    keep: int
    resume_from: str | None = None


class OnNotFinite(StrEnum):
    """What a step does whose loss or gradients are not finite. Stop: the run ends there, and fails. Skip: the step
    changes nothing. Warn: the step is made."""

    STOP = "Stop"
    SKIP = "Skip"
    WARN = "Warn"


@dataclass(frozen=True)
class ReportSpec:
    """What is written beside the model; `uri` None means the directory the environment names, or nowhere."""

    uri: str | None = None
    tensor_board: bool = False
    gradient_noise_scale: bool = False


@dataclass(frozen=True)
class ScalingRow:
    """One line of how the recipe came from the slice it was tuned on to this one; words for the report only."""

    name: str
    tuned_on: str
    runs_on: str
    rule: str


@dataclass(frozen=True)
class RunSpec:
    """One training run, fully resolved: nothing in it is left for the trainer to derive.

    `recipe`: what the user wrote, field by field; only compared, to tell whether two jobs train the same.
    `dataset_size`: the examples that `train_steps` were derived from, None where steps were given.
    `document`: the JSON it was read from, which the history of the run records.
    """

    job: JobRef
    entrypoint: str
    backend: str
    hardware: str
    slice: Slice
    batch: Batch
    train_steps: int
    warmup_steps: int
    schedule: ScheduleSpec
    evaluate_every_steps: int | None
    ema_decay: float | None
    seed: int
    optimizer: OptimizerSpec
    parameters: Mapping[str, str]
    data_uri: str | None
    torch: TorchSpec = TorchSpec()
    on_not_finite: OnNotFinite = OnNotFinite.STOP
    checkpoint: CheckpointSpec | None = None
    report: ReportSpec = ReportSpec()
    scaling: tuple[ScalingRow, ...] = ()
    recipe: Mapping[str, str] = field(default_factory=dict)
    dataset_size: int | None = None
    document: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def process_per_device(self) -> bool:
        """Whether a host of this run is more than one process, or may be: how many chips there are, only PJRT knows.

        TorchTPU wants its layout decided by a parent, even of a single process.
        """
        if self.backend == "torch":
            return self.torch.processes_per_host > 1 or self.torch.device == "tpu"
        return self.backend == "xla" and self.hardware == "TPU"
