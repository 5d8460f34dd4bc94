"""What operator and trainer agree on besides the run spec and the history: exit codes, phases, findings, limits, and
the variables of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum

RUN_SPEC_SCHEMA = "runspec/v1"
HISTORY_SCHEMA = "history/v1"
HISTORY_FILE = "history.json"

TERMINATION_MESSAGE_LIMIT = 4096
"""Bytes of a termination message that Kubernetes keeps."""


class ExitCode(IntEnum):
    """How a worker ended. The member's name is the `outcome` of the termination message.

    The numbers above 1 follow sysexits.h, away from the small codes of users' own programs.
    """

    Succeeded = 0
    UserError = 1
    NotFinite = 65
    CheckpointUnusable = 66
    PeerLost = 69
    InternalError = 70
    Hung = 71
    SliceUnfit = 72
    StorageFailed = 74
    Preempted = 75
    Diverged = 76
    StorageDenied = 77
    BadSpec = 78


class ReportPhase(StrEnum):
    """What the training is doing, as reported to the operator; it decides how long the training may be silent. The
    first steps count as starting, because their programs are compiled."""

    STARTING = "Starting"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    CHECKPOINTING = "Checkpointing"
    DONE = "Done"


class ProgramMatch(StrEnum):
    """Whether a worker's step that repeats is the program that the entry check has compiled. Alike: its arguments,
    products and collectives are."""

    SAME = "Same"
    ALIKE = "Alike"
    OTHER = "Other"


class Phase(StrEnum):
    """What the replica spends its time on. `DEVICE` is waiting for results: the device's own work, or a peer that is
    late."""

    START = "start"
    INPUT = "input"
    HOST = "host"
    DEVICE = "device"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"


class StartPhase(StrEnum):
    """What an attempt does before its first step, in this order. The operator reads the first ones from the pods; the
    worker measures those from `IMPORTS` on."""

    # docs/status.md#starts says where each begins and ends.

    NOTICED = "noticed"
    QUEUED = "queued"
    BACKOFF = "backoff"
    CLEARED = "cleared"
    BOUND = "bound"
    STARTED = "started"
    IMPORTS = "imports"
    MEETING = "meeting"
    TASK = "task"
    CHECKPOINT = "checkpoint"
    COMPILED = "compiled"
    FIRST_STEP = "firstStep"
    UNTOLD = "untold"
    """All phases of a worker that does not report them."""


WORKER_PHASES = (
    StartPhase.IMPORTS,
    StartPhase.MEETING,
    StartPhase.TASK,
    StartPhase.CHECKPOINT,
    StartPhase.COMPILED,
    StartPhase.FIRST_STEP,
)
"""What a worker measures of its start. It reports `COMPILED` only once its first step is made."""


class Check(StrEnum):
    """Something that the trainer's doctor looks for."""

    # docs/doctor.md says what each means and what to do about it.

    RECOMPILATION = "RecompilationAfterWarmUp"
    CPU_FALLBACK = "CpuFallback"
    HOST_SYNC = "HostSync"
    MID_STEP_EXECUTION = "MidStepExecution"
    PADDING = "Padding"
    INPUT_BOUND = "InputBound"
    STRAGGLER_HOST = "StragglerHost"
    NOT_FINITE = "NotFinite"
    UNEQUAL_COMPILATIONS = "UnequalCompilations"


XLA_CHECKS = (Check.CPU_FALLBACK, Check.HOST_SYNC, Check.MID_STEP_EXECUTION, Check.PADDING)
"""What the doctor reads from torch_xla."""

PROGRAM_CHECKS = (Check.RECOMPILATION, Check.UNEQUAL_COMPILATIONS)
"""What the doctor counts wherever steps are compiled."""

LOSS_FALLS = 2.58
"""The standard errors by which a loss must have fallen in one of two tests. Each of them is wrong in 1 of 200 trainings
that learn nothing."""

MOST_LOSSES = 16
"""The most points of the curve that a rung reports."""

_ADAM_SETTINGS = frozenset({"weight_decay", "beta1", "beta2", "epsilon"})
OPTIMIZERS: Mapping[str, frozenset[str]] = {
    "adafactor": frozenset({"weight_decay"}),
    "adam": _ADAM_SETTINGS,
    "adamw": _ADAM_SETTINGS,
    "lion": frozenset({"weight_decay", "beta1", "beta2"}),
    "rmsprop": frozenset({"momentum", "weight_decay", "beta2", "epsilon"}),
    "sgd": frozenset({"momentum", "weight_decay"}),
}
"""The optimizers that the trainer builds by name, and what each takes besides the learning rate."""

DEFAULT_FACTOR = 0.1
"""The factor of schedules Step and Plateau, if the recipe gives none."""

REPORT_LIMIT = 64 * 1024
"""The largest report that the operator accepts, in bytes."""

MOST_METRICS = 64
MOST_WARNINGS = 20
WARNING_LENGTH = 1024
STACKS_LIMIT = 16 * 1024
"""The most that a report may hold: numbers of metrics and warnings, characters of a warning and of a stack dump."""

MOST_CODE_FILES = 10_000
LARGEST_CODE_ARCHIVE = 64 * 1024**2
LARGEST_CODE = 256 * 1024**2
"""Limits of trainer.code: number of files, bytes of the archive, bytes of the files in it."""

REQUIREMENTS_FILE = "requirements.txt"
"""The file of trainer.code that names the packages to install before the code is imported."""

WHEELS_FOLDER = "wheels"
"""The folder of trainer.code that holds all packages of the file, so that no index is asked."""


class PackageSource(StrEnum):
    """Where the packages of the file come from, as `ENV_PACKAGES` says: an index or a wheelhouse, a wheelhouse only, or
    nowhere, where they must be installed already."""

    INDEX = "Index"
    WHEELHOUSE = "Wheelhouse"
    INSTALLED = "Installed"


ENV_RUN_SPEC = "TPUJOB_RUN_SPEC"
ENV_NUM_HOSTS = "TPUJOB_NUM_HOSTS"
ENV_HOST_INDEX = "TPUJOB_HOST_INDEX"
ENV_MASTER_ADDR = "MASTER_ADDR"
ENV_MASTER_PORT = "MASTER_PORT"
ENV_TERMINATION_LOG = "TPUJOB_TERMINATION_LOG"
ENV_REPORT_DIRECTORY = "TPUJOB_REPORT_DIRECTORY"
ENV_CODE_DIRECTORY = "TPUJOB_CODE_DIRECTORY"
ENV_CODE_ARCHIVE = "TPUJOB_CODE_ARCHIVE"
ENV_PACKAGES = "TPUJOB_PACKAGES"
ENV_PACKAGES_SHA256 = "TPUJOB_PACKAGES_SHA256"
ENV_COMPILE_SECONDS = "TPUJOB_COMPILE_SECONDS"
ENV_HANG_SECONDS = "TPU_TRAINER_HANG_SECONDS"
ENV_PROGRESS_URL = "TPUJOB_PROGRESS_URL"
ENV_PROGRESS_TOKEN_FILE = "TPUJOB_PROGRESS_TOKEN_FILE"  # noqa: S105 - a name
ENV_PROGRESS_CA_FILE = "TPUJOB_PROGRESS_CA_FILE"

# Kubeflow Trainer's names (KEP-2779), for an image that runs under it; the last two are paths.
ENV_KUBEFLOW_URL = "KUBEFLOW_TRAINER_SERVER_URL"
ENV_KUBEFLOW_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - a name
ENV_KUBEFLOW_CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
