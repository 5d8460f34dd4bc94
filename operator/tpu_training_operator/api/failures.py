"""The failure reasons that decisions depend on, each written once.

Most reasons only inform people; they are in `domain.failures.table` or come from Kubernetes.
"""

from enum import StrEnum


class FailureReason(StrEnum):
    """The `reason` of a failure in the status, if the operator acts on it or gives it without a sign in a pod."""

    DEVICE_BUSY = "DeviceBusy"
    DEVICE_FAILED = "DeviceFailed"
    DEVICES_UNHEALTHY = "DevicesUnhealthy"
    HOST_UNFIT = "HostUnfit"
    DIVERGED = "Diverged"
    STORAGE_DENIED = "StorageDenied"
    POD_DELETED = "PodDeleted"
    WORKER_HIDDEN = "WorkerHidden"
    PREEMPTED_BY_SCHEDULER = "PreemptionByScheduler"
    NOT_STARTED = "NotStarted"
    NO_PROGRESS = "NoProgress"
    STRAGGLER = "Straggler"
