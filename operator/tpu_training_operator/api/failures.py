"""The exit codes and failure reasons that decisions depend on, each written once.

Most reasons only inform people; they are in `domain.failures.table` or come from Kubernetes.
"""

from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """How the trainer exits without success. A contract test compares it with `tpu_trainer.contract.protocol`."""

    USER_ERROR = 1
    NOT_FINITE = 65
    CHECKPOINT_UNUSABLE = 66
    PEER_LOST = 69
    INTERNAL_ERROR = 70
    HUNG = 71
    STORAGE_FAILED = 74
    PREEMPTED = 75
    DIVERGED = 76
    STORAGE_DENIED = 77
    BAD_SPEC = 78


class FailureReason(StrEnum):
    """The `reason` of a failure in the status, if the operator acts on it or gives it without a sign in a pod."""

    DEVICE_BUSY = "DeviceBusy"
    DEVICE_FAILED = "DeviceFailed"
    DEVICES_UNHEALTHY = "DevicesUnhealthy"
    DIVERGED = "Diverged"
    STORAGE_DENIED = "StorageDenied"
    POD_DELETED = "PodDeleted"
    WORKER_HIDDEN = "WorkerHidden"
    PREEMPTED_BY_SCHEDULER = "PreemptionByScheduler"
    NOT_STARTED = "NotStarted"
    NO_PROGRESS = "NoProgress"
    STRAGGLER = "Straggler"
