"""The run spec: what one training run is, fully resolved. Read once by `entry`; everybody else only holds it."""

from tpu_trainer.spec.model import (
    Batch,
    CheckpointSpec,
    JobRef,
    OnNotFinite,
    OptimizerSpec,
    ReportSpec,
    RunSpec,
    ScalingRow,
    ScheduleSpec,
    Slice,
    TorchSpec,
)
from tpu_trainer.spec.parser import BACKENDS, LARGEST_SEED, SCHEDULES, parse_run_spec, read_run_spec

__all__ = [
    "BACKENDS",
    "LARGEST_SEED",
    "SCHEDULES",
    "Batch",
    "CheckpointSpec",
    "JobRef",
    "OnNotFinite",
    "OptimizerSpec",
    "ReportSpec",
    "RunSpec",
    "ScalingRow",
    "ScheduleSpec",
    "Slice",
    "TorchSpec",
    "parse_run_spec",
    "read_run_spec",
]
