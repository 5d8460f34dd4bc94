"""What class of failure a worker's end is: one table, the surest sign first. Called by `domain.failures`.

docs/failures.md says of every reason what it means and what a person should do; a test holds the two together.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto

from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.domain.last_words import cut, last_words, with_last_words
from tpu_training_operator.domain.observed import WorkerPod
from tpu_training_operator.domain.pod_signs import (
    Sign,
    both,
    deleted_first,
    disrupted_by,
    disruption,
    exited_with,
    failed_sidecar,
    has_failed,
    kubelet_says,
    mentions,
    never_ran,
    status_message,
    status_reason,
    terminated_as,
    waiting,
    waits_as,
)

# The trainer's exit codes (`tpu_trainer.contract.ExitCode`); a contract test compares the two tables.
EXIT_CODE_CLASSES = {
    1: (FailureClass.USER_ERROR, "UserError"),
    69: (FailureClass.INFRASTRUCTURE, "PeerLost"),
    70: (FailureClass.UNKNOWN, "InternalError"),
    71: (FailureClass.HANG, "Hung"),
    74: (FailureClass.INFRASTRUCTURE, "StorageFailed"),
    75: (FailureClass.PREEMPTION, "Preempted"),
    # The same program on the same data once more: a chip that computes wrongly is a matter of the node it was on.
    76: (FailureClass.UNKNOWN, "Diverged"),
    78: (FailureClass.USER_ERROR, "BadSpec"),
}
_PEER_LOST = 69

# The reasons that speak against a node's chips rather than against the node or the network.
DEVICE_FAULTS = frozenset({"DeviceBusy", "DeviceFailed", "DevicesUnhealthy"})

# 128 and the signal that ends a program which did something wrong itself.
_SIGNALS = {
    129: "SIGHUP",
    130: "SIGINT",
    131: "SIGQUIT",
    132: "SIGILL",
    133: "SIGTRAP",
    134: "SIGABRT",
    135: "SIGBUS",
    136: "SIGFPE",
    139: "SIGSEGV",
    141: "SIGPIPE",
    152: "SIGXCPU",
    153: "SIGXFSZ",
    159: "SIGSYS",
}
_AT_ONCE = timedelta(0)
# A Secret or an image may be pushed a moment after the job that needs it.
_MOMENT = timedelta(minutes=1)
# On a fresh node the kubelet's own credentials may be late.
_CREDENTIALS = timedelta(minutes=2)
_RETRIES = timedelta(minutes=5)

_ON_A_LIMIT_OF_ITS_OWN = re.compile(r"exceeds the (total )?limit|exceeded its local ephemeral storage limit")
_UNHEALTHY = re.compile(r"healthy|unregistered device|devices unavailable")
_NO_IMAGE = re.compile(r"code = NotFound|manifest unknown|name unknown|: not found\b|404 Not Found|no match for platform")
_NO_ACCESS = re.compile(
    r"access denied|unauthorized|authorization failed|authentication required|401 Unauthorized|403 Forbidden"
    r"|PermissionDenied|signature validation failed",
    re.IGNORECASE,
)
_NO_PROGRAM = re.compile(
    r"exec:? .*(executable file not found|no such file or directory|permission denied|is a directory|format error)"
    r"|chdir to cwd"
)
# What a node gets over by itself: its runtime is slow, its disk full, its caches are cold.
_MAY_HEAL = re.compile(
    r"timed out|deadline exceeded|i/o timeout|is reserved for|unavailable|connection refused|transport is closing"
    r"|too many requests|no space left",
    re.IGNORECASE,
)
# The device's name and the kernel's error on one line, in either order. "Busy" alone may be a port or a file; and that
# "the TPU is already in use by process with pid 7" is libtpu's lock in the container's own /tmp: the user's process.
_CHIP = r"/dev/(?:vfio|accel)"
_BUSY = r"[Rr]esource busy"
_BROKEN = r"(?:[Nn]o such device|Input/output error|not a device node)"
_CHIP_BUSY = re.compile(rf"{_CHIP}.{{0,80}}{_BUSY}|{_BUSY}.{{0,80}}{_CHIP}")
_CHIP_BROKEN = re.compile(
    rf"{_CHIP}.{{0,80}}{_BROKEN}|{_BROKEN}.{{0,80}}{_CHIP}|stat {_CHIP}\S*: no such file"
    r"|TPU initialization failed: No \w+ device found"
)

_SHUTDOWN = kubelet_says("Terminated", "NodeShutdown", "Shutdown")
_PULLS = waits_as("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed")
_CREATES = waits_as("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreStartHookError")


class Doubt(Enum):
    """Whether an end may be the consequence of another worker's."""

    NONE = auto()
    OWN_LOOP = auto()
    """If the loop is the user's own: its exit code does not tell a lost peer from an error."""
    LOST_PEER = auto()
    """It says itself that it is."""


@dataclass(frozen=True)
class Row:
    """`words` are what the record says. `patience`: for a pod that has its node and does not start, how long after it
    got there this is no longer a matter of time; None for a pod that has ended."""

    reason: str | Callable[[WorkerPod], str]
    failure_class: FailureClass
    sign: Sign
    words: Callable[[WorkerPod], str]
    patience: timedelta | None = None
    doubt: Doubt = Doubt.NONE


@dataclass(frozen=True)
class Cause:
    failure_class: FailureClass
    reason: str
    message: str
