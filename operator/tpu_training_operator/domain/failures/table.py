"""Classifies a worker's failure by what Kubernetes and the worker report: one table, the surest sign first.

docs/failures.md explains each reason and what to do about it; a test compares the two.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from functools import lru_cache
from operator import attrgetter
from signal import Signals

from tpu_contract.protocol import ExitCode
from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.trainer import SHARED_MEMORY
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.failures.launcher import read_launcher, without_ranks
from tpu_training_operator.domain.failures.messages import shorten, with_ending
from tpu_training_operator.domain.failures.pod_signs import (
    NODE_GONE,
    TAINT_EVICTION,
    disruption,
    failed_sidecar,
    failed_with_code_0,
    has_failed,
    is_disrupted,
    is_held_up,
    left_early,
    status_message,
    status_reason,
    was_deleted_first,
)

Sign = Callable[[WorkerPod], bool]

EXIT_CODE_CLASSES: Mapping[ExitCode, FailureClass] = {
    ExitCode.UserError: FailureClass.USER_ERROR,
    ExitCode.NotFinite: FailureClass.NOT_FINITE,
    # A restart would find the same files; only a person can say that their training may be lost.
    ExitCode.CheckpointUnusable: FailureClass.USER_ERROR,
    ExitCode.PeerLost: FailureClass.INFRASTRUCTURE,
    ExitCode.InternalError: FailureClass.UNKNOWN,
    ExitCode.Hung: FailureClass.HANG,
    ExitCode.SliceUnfit: FailureClass.INFRASTRUCTURE,
    ExitCode.StorageFailed: FailureClass.INFRASTRUCTURE,
    ExitCode.Preempted: FailureClass.PREEMPTION,
    # A chip that computes wrongly would fail this way; on other nodes the same program may succeed.
    ExitCode.Diverged: FailureClass.UNKNOWN,
    ExitCode.StorageDenied: FailureClass.USER_ERROR,
    ExitCode.BadSpec: FailureClass.USER_ERROR,
}

# Exit codes by the outcome that the trainer, or a loop of the user's own, names in the termination message.
_CODES = {code.name: code for code in EXIT_CODE_CLASSES}

# Reasons that point at a node's chips rather than at the node or the network.
DEVICE_FAULTS = frozenset(
    {
        FailureReason.DEVICE_BUSY,
        FailureReason.DEVICE_FAILED,
        FailureReason.DEVICES_UNHEALTHY,
        FailureReason.HOST_UNFIT,
    }
)

# Exit codes of programs that a signal ended because of an error in them: 128 plus the signal.
_SIGNALS = {128 + number: Signals(number).name for number in (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 24, 25, 31)}
_AT_ONCE = timedelta(0)
# Patience counts from when the pod got its node. A Secret or an image may arrive just after the job that needs it.
_MOMENT = timedelta(minutes=1)
# On a fresh node the kubelet's own credentials may be late.
_CREDENTIALS = timedelta(minutes=2)
_RETRIES = timedelta(minutes=5)
# Characters to search at either end of a text: errors are there, and the kubelet copies no more than this from a log.
_SEARCHED = 1024

# Errors that are only texts. The kubelet passes on those of the registry, the container runtime and the device manager;
# those of libtpu and the kernel are in the worker's last words. The patterns are narrow on purpose: a failure that they
# miss still has its exit code, but one that they mistake gets a wrong class. Tenants write these texts and could make
# them slow to search, so every repetition has a bound.
_OWN_STORAGE_LIMIT = re.compile(r"exceeds the (total )?limit|exceeded its local ephemeral storage limit")
_UNHEALTHY_CHIPS = re.compile(r"healthy|unregistered device|devices unavailable")
_NO_IMAGE = re.compile(
    r"code = NotFound|manifest unknown|name unknown|: not found\b|404 Not Found|no match for platform"
)
_NO_ACCESS = re.compile(
    r"access denied|unauthorized|authorization failed|authentication required|401 Unauthorized|403 Forbidden"
    r"|PermissionDenied|signature validation failed",
    re.IGNORECASE,
)
_NO_PROGRAM = re.compile(
    r"executable file .{0,300}not found"
    r"|exec:? .{0,300}(no such file or directory|permission denied|is a directory|format error)"
    r"|no command specified|chdir to cwd"
    # The working directory, which runc creates inside the container.
    r"|container init: .{0,80}mkdir .{0,300}: (not a directory|permission denied|read-only file system)"
)
# The node may recover by itself: its runtime is slow, its disk full, its caches cold.
_MAY_HEAL = re.compile(
    r"timed out|deadline exceeded|i/o timeout|is reserved for|unavailable|connection refused|transport is closing"
    r"|too many requests|no space left",
    re.IGNORECASE,
)
# The device's name and the kernel's error on one line, in either order. "Busy" alone may mean a port or a file, and
# "the TPU is already in use by process with pid 7" means libtpu's lock in the container's own /tmp: a user's process.
_CHIP = r"/dev/(?:vfio|accel)"
_BUSY = r"[Rr]esource busy"
_BROKEN = r"(?:[Nn]o such device|Input/output error|not a device node)"
_CHIP_BUSY = re.compile(rf"{_CHIP}.{{0,80}}{_BUSY}|{_BUSY}.{{0,80}}{_CHIP}")
_CHIP_BROKEN = re.compile(
    rf"{_CHIP}.{{0,80}}{_BROKEN}|{_BROKEN}.{{0,80}}{_CHIP}|stat {_CHIP}\S{{0,80}}: no such file"
    r"|TPU initialization failed: No \w{1,40} device found"
)
_DENIED = r"(?:[Pp]ermission denied|[Oo]peration not permitted)"
_CHIP_DENIED = re.compile(rf"{_CHIP}.{{0,80}}{_DENIED}|{_DENIED}.{{0,80}}{_CHIP}")
# Errors of PyTorch's loader processes and of its files in /dev/shm.
_SHARED_MEMORY_FULL = re.compile(
    r"insufficient shared memory|out of shared memory|DataLoader worker .{0,80}Bus error"
    r"|unable to allocate shared memory|</?torch_\S{1,80}>: No space left on device"
)
_LOADER_LOST = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]{1,300}\) exited unexpectedly")
# gloo has no error type for a lost connection.
_CONNECTION_LOST = re.compile(
    r"gloo/transport/.{0,80}(?:Connection closed by peer|Connection reset by peer|Broken pipe)"
)
# "... and image will run as root", "... and image has non-numeric user (app), cannot verify user is non-root".
_ROOT_IMAGE = re.compile(r"runAsNonRoot|breaks non-root policy")


class Doubt(Enum):
    """How likely another worker's failure caused this one."""

    NONE = auto()
    IN_OWN_LOOP = auto()
    """Possible only in a loop of the user's own, whose exit code does not distinguish a lost peer from an error."""
    LOST_PEER = auto()
    """Certain: the worker reports that it lost a peer."""


@dataclass(frozen=True)
class FailureRow:
    """A sign and what it means.

    `patience` is for pods that do not start: how long after a pod got its node the sign counts as a failure. It is None
    in rows for pods that have begun to end.

    `is_early`: until the pod has ended, the container runtime may still give another reason. It learns separately that
    memory ran out, and under load only after the container has ended.
    """

    reason: str | Callable[[WorkerPod], str]
    failure_class: FailureClass
    sign: Sign
    words: Callable[[WorkerPod], str]
    patience: timedelta | None = None
    doubt: Doubt = Doubt.NONE
    is_early: bool = False

    def reason_for(self, pod: WorkerPod) -> str:
        return self.reason if isinstance(self.reason, str) else self.reason(pod)

    def message_for(self, pod: WorkerPod) -> str:
        return shorten(self.words(pod))


def classify(pod: WorkerPod) -> FailureRow | None:
    """Returns the first row that fits; None for a pod without any sign of failure."""
    # Most pods of a gang are healthy, so they should cost only one test.
    rows = _ENDINGS if has_failed(pod) else _NEVER_STARTS if is_held_up(pod) else ()
    return next((row for row in rows if row.sign(pod)), None)


def with_started_peers(row: FailureRow) -> FailureRow:
    """Adapts the row of a worker that does not start to a gang in which another worker has started.

    They share the image and the spec, so both are good, and the cause is this worker's node or temporary.
    """
    if row not in _DOES_NOT_START or row.failure_class is FailureClass.INFRASTRUCTURE:
        return row
    patience = None if row.patience is None else _RETRIES
    return replace(
        row,
        failure_class=FailureClass.INFRASTRUCTURE,
        words=lambda pod: with_ending(_OTHERS_STARTED, row.words(pod)),
        patience=patience,
    )


def own_exit_code(pod: WorkerPod) -> int | None:
    """Returns the exit code of the program that trains. A launcher may have replaced it by 1, the task by 0."""
    is_replaced = failed_with_code_0(pod) if pod.runs_trainer else pod.exit_code == ExitCode.UserError
    if not is_replaced:
        return pod.exit_code
    if pod.trainer_message is not None and pod.trainer_message.outcome in _CODES:
        return _CODES[pod.trainer_message.outcome]
    launched = None if pod.runs_trainer else read_launcher(pod.last_words)
    return launched.exit_code if launched else pod.exit_code


def own_words(pod: WorkerPod) -> str:
    """Returns the last words of the program that trains, without its launcher's closing lines."""
    if pod.runs_trainer:
        return pod.last_words
    if pod.trainer_message is not None and pod.trainer_message.outcome == "Succeeded":
        # The last words are the training's; what failed afterwards, such as an export, left none.
        return with_ending(f"{_AFTER_THE_TRAINING} (exit code {pod.exit_code}; its log says why)", pod.last_words)
    launched = read_launcher(pod.last_words)
    return launched.words if launched else without_ranks(pod.last_words)


def _blames_its_host(pod: WorkerPod) -> bool:
    """Tells whether the line of the slice check that the worker ended with is about this very host."""
    return pod.trainer_message is not None and pod.trainer_message.slice_check.host == pod.name


def _lost_its_peer(pod: WorkerPod) -> bool:
    """Tells whether a loop of the user's own lost its peer; the trainer has an exit code for that."""
    return (
        not pod.runs_trainer and own_exit_code(pod) == ExitCode.UserError and _is_in(own_words(pod), _CONNECTION_LOST)
    )


def _disruption_message(pod: WorkerPod) -> str:
    return str(disruption(pod).get("message") or status_message(pod) or "the pod was disrupted")


def _kubelet_message(pod: WorkerPod) -> str:
    return status_message(pod) or "the kubelet gives no message"


def _waiting_message(pod: WorkerPod) -> str:
    reason, message = pod.waiting()
    return message or f"the container waits in {reason}"


def _words_or_code(pod: WorkerPod) -> str:
    return own_words(pod) or f"the worker exited with code {own_exit_code(pod)}"


def _add_last_words(what: str) -> Callable[[WorkerPod], str]:
    return lambda pod: with_ending(what, pod.last_words)


def _describe_kill(pod: WorkerPod) -> str:
    return with_ending(f"the worker was killed (exit code {own_exit_code(pod)})", own_words(pod))


def _describe_crash(pod: WorkerPod) -> str:
    code = own_exit_code(pod)
    return with_ending(f"the worker was ended by {_SIGNALS.get(code or 0)} (exit code {code})", own_words(pod))


def _among(read: Callable[[WorkerPod], object]) -> Callable[..., Sign]:
    """Returns the sign that what is read is one of several values."""
    return lambda *values: lambda pod: read(pod) in values


_disrupted_by = _among(lambda pod: disruption(pod).get("reason"))
# Reasons of the pod itself, not of a container.
_kubelet_says = _among(status_reason)
_terminated_as = _among(lambda pod: pod.termination.get("reason"))
_waits_as = _among(lambda pod: pod.waiting()[0])
_exited_with = _among(own_exit_code)


def _mentions(text: re.Pattern[str]) -> Sign:
    """Returns the sign that the text occurs in a message of the pod, of its waiting container or of its ended one."""

    def mentions(pod: WorkerPod) -> bool:
        return any(_is_in(message, text) for message in (status_message(pod), pod.waiting()[1], pod.last_words))

    return mentions


# The workers of a gang often fail with the same text.
@lru_cache(maxsize=256)
def _is_in(message: str, text: re.Pattern[str]) -> bool:
    """Searches the beginning and the end of a long text: searching takes time, and there are thousands of pods."""
    ends = message if len(message) <= 2 * _SEARCHED else f"{message[:_SEARCHED]}\n{message[-_SEARCHED:]}"
    return text.search(ends) is not None


def _both(first: Sign, second: Sign) -> Sign:
    return lambda pod: first(pod) and second(pod)


def _never_ran(pod: WorkerPod) -> bool:
    """Tells whether the pod failed although the worker's container did not."""
    return pod.phase == "Failed" and not pod.exit_code


_last_words: Callable[[WorkerPod], str] = attrgetter("last_words")
_AFTER_THE_TRAINING = "the program failed after its training had ended"
DELETED_WHILE_RUNNING = "the pod was deleted while the gang was running"
_FORGOTTEN = "the node lost track of the container, as happens when a node restarts"
_OTHERS_STARTED = "other workers started with the same image and spec, but this one did not"
_EXITED_EARLY = (
    "the worker exited with code 0 before the training had ended: something in the task ended the process (os._exit)"
)
_OUT_OF_MEMORY = "the worker used more memory than its limit"
_NO_RIGHT_TO_CHIPS = (
    "the worker's user may not open the chips; set trainer.securityContext (runAsUser: 0, or the device's group in"
    " supplementalGroups)"
)
_RAISE_SHARED_MEMORY = (
    f"{SHARED_MEMORY} is full; raise trainer.sharedMemory or leave it out, or use fewer loader processes"
)
_LOADER_KILLED = (
    "a loader process (Task.workers, num_workers) was killed; if the log says Bus error, raise trainer.sharedMemory"
)
_NUMBER_THE_USER = (
    "the image's user is root, or is known by name only; set trainer.securityContext.runAsUser to the number of the"
    " user to run as (0 for root)"
)

_PULLS = _waits_as(
    "ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"
)
_CREATES = _waits_as(
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError", "PreStartHookError"
)
_USER, _INFRASTRUCTURE = FailureClass.USER_ERROR, FailureClass.INFRASTRUCTURE
_PREEMPTION, _UNKNOWN = FailureClass.PREEMPTION, FailureClass.UNKNOWN

_DISRUPTED = (
    FailureRow("NodeLost", _INFRASTRUCTURE, _disrupted_by(TAINT_EVICTION, NODE_GONE), _disruption_message),
    # The kubelet's condition has the same reason for all pods that it ends, so the pod's own reason decides.
    FailureRow("NodeShutdown", _PREEMPTION, _kubelet_says("Terminated", "NodeShutdown", "Shutdown"), _kubelet_message),
    # The pod exceeded its own limit, and would on any other node.
    FailureRow(
        "StorageLimitExceeded",
        _UNKNOWN,
        _both(_kubelet_says("Evicted"), _mentions(_OWN_STORAGE_LIMIT)),
        _kubelet_message,
    ),
    FailureRow("Evicted", _INFRASTRUCTURE, _kubelet_says("Evicted"), _kubelet_message),
    FailureRow("PreemptedByKubelet", _PREEMPTION, _kubelet_says("Preempting"), _kubelet_message),
    # PreemptionByScheduler, EvictionByEvictionAPI and any newer one: the node was wanted for something else.
    FailureRow(
        lambda pod: str(disruption(pod).get("reason") or "Disrupted"), _PREEMPTION, is_disrupted, _disruption_message
    ),
)
_ENDED_FROM_OUTSIDE = (
    FailureRow("OOMKilled", FailureClass.OUT_OF_MEMORY, _terminated_as("OOMKilled"), _add_last_words(_OUT_OF_MEMORY)),
    FailureRow(
        FailureReason.DEVICES_UNHEALTHY,
        _INFRASTRUCTURE,
        _both(_kubelet_says("UnexpectedAdmissionError"), _mentions(_UNHEALTHY_CHIPS)),
        _kubelet_message,
    ),
    # OutOfcpu, NodeAffinity, TopologyAffinityError and any other reason to refuse a pod: the cause is the node.
    FailureRow(status_reason, _INFRASTRUCTURE, lambda pod: bool(status_reason(pod)), _kubelet_message),
    FailureRow(FailureReason.POD_DELETED, _INFRASTRUCTURE, was_deleted_first, _add_last_words(DELETED_WHILE_RUNNING)),
    # After a restart of the node, containerd does not know how the container ended (255), or the kubelet cannot find
    # it.
    FailureRow(
        "ContainerStatusUnknown",
        _INFRASTRUCTURE,
        _terminated_as("ContainerStatusUnknown", "Unknown"),
        _add_last_words(_FORGOTTEN),
    ),
)
_NEVER_RAN = (
    FailureRow("SidecarFailed", _UNKNOWN, _both(_never_ran, lambda pod: bool(failed_sidecar(pod))), failed_sidecar),
    FailureRow("PodFailed", _INFRASTRUCTURE, _never_ran, lambda pod: status_message(pod) or "the pod failed"),
)
_LAST_WORDS = (
    FailureRow(FailureReason.DEVICE_BUSY, _INFRASTRUCTURE, _mentions(_CHIP_BUSY), _last_words),
    FailureRow(FailureReason.DEVICE_FAILED, _INFRASTRUCTURE, _mentions(_CHIP_BROKEN), _last_words),
    FailureRow("DeviceDenied", _USER, _mentions(_CHIP_DENIED), _add_last_words(_NO_RIGHT_TO_CHIPS)),
    FailureRow("SharedMemoryFull", _USER, _mentions(_SHARED_MEMORY_FULL), _add_last_words(_RAISE_SHARED_MEMORY)),
    FailureRow("LoaderLost", _USER, _mentions(_LOADER_LOST), _add_last_words(_LOADER_KILLED)),
)
_START_ERRORS = (
    FailureRow(
        "CannotStart",
        _USER,
        _both(_terminated_as("StartError", "ContainerCannotRun"), _mentions(_NO_PROGRAM)),
        _last_words,
    ),
    FailureRow("StartError", _UNKNOWN, _terminated_as("StartError", "ContainerCannotRun"), _words_or_code),
)
_EXIT_CODES = (
    FailureRow("ExitedEarly", _USER, left_early, lambda _: _EXITED_EARLY),
    FailureRow("PeerLost", _INFRASTRUCTURE, _lost_its_peer, _words_or_code, doubt=Doubt.LOST_PEER),
    FailureRow(
        FailureReason.HOST_UNFIT,
        _INFRASTRUCTURE,
        _both(_exited_with(ExitCode.SliceUnfit), _blames_its_host),
        _words_or_code,
    ),
    *(
        FailureRow(
            code.name,
            failure_class,
            _exited_with(code),
            _words_or_code,
            doubt=Doubt.LOST_PEER if code is ExitCode.PeerLost else Doubt.IN_OWN_LOOP,
        )
        for code, failure_class in EXIT_CODE_CLASSES.items()
    ),
    # 2: wrong arguments, in Python and most programs. 126 and 127: the shell could not execute or find the program.
    FailureRow("UserError", _USER, _exited_with(2), _words_or_code, doubt=Doubt.IN_OWN_LOOP),
    FailureRow("CannotStart", _USER, _exited_with(126, 127), _words_or_code, doubt=Doubt.IN_OWN_LOOP),
    # 128 + SIGKILL and 128 + SIGTERM: ended from outside, not by the program.
    FailureRow("Killed", _INFRASTRUCTURE, _exited_with(137, 143), _describe_kill, is_early=True),
    FailureRow("Crashed", _UNKNOWN, _exited_with(*_SIGNALS), _describe_crash, doubt=Doubt.IN_OWN_LOOP),
    FailureRow("ExitCode", _UNKNOWN, lambda _: True, _words_or_code, doubt=Doubt.IN_OWN_LOOP),
)
_NEVER_STARTS = (
    FailureRow("InvalidImageName", _USER, _waits_as("InvalidImageName"), _waiting_message, _AT_ONCE),
    FailureRow("ErrImageNeverPull", _USER, _waits_as("ErrImageNeverPull"), _waiting_message, _AT_ONCE),
    FailureRow("ImagePullDenied", _USER, _both(_PULLS, _mentions(_NO_ACCESS)), _waiting_message, _CREDENTIALS),
    # Ten seconds after the first error the kubelet backs off and, since Kubernetes 1.32, says why.
    FailureRow(
        "ImageNotFound", _USER, _both(_waits_as("ImagePullBackOff"), _mentions(_NO_IMAGE)), _waiting_message, _AT_ONCE
    ),
    FailureRow("ImageNotFound", _USER, _both(_PULLS, _mentions(_NO_IMAGE)), _waiting_message, _MOMENT),
    FailureRow("ImagePullFailed", _INFRASTRUCTURE, _PULLS, _waiting_message, _RETRIES),
    FailureRow(
        FailureReason.DEVICE_FAILED,
        _INFRASTRUCTURE,
        _both(_CREATES, _mentions(_CHIP_BROKEN)),
        _waiting_message,
        _MOMENT,
    ),
    FailureRow(
        "ContainerNotCreated", _INFRASTRUCTURE, _both(_CREATES, _mentions(_MAY_HEAL)), _waiting_message, _RETRIES
    ),
    FailureRow("CannotStart", _USER, _both(_CREATES, _mentions(_NO_PROGRAM)), _waiting_message, _MOMENT),
    FailureRow(
        "RootImage",
        _USER,
        _both(_waits_as("CreateContainerConfigError"), _mentions(_ROOT_IMAGE)),
        lambda pod: with_ending(_NUMBER_THE_USER, _waiting_message(pod)),
        _AT_ONCE,
    ),
    FailureRow("CreateContainerConfigError", _USER, _waits_as("CreateContainerConfigError"), _waiting_message, _MOMENT),
    FailureRow(lambda pod: pod.waiting()[0], _UNKNOWN, _CREATES, _waiting_message, _MOMENT),
)
_DOES_NOT_START = (*_START_ERRORS, *_NEVER_STARTS)
_ENDINGS = (*_DISRUPTED, *_ENDED_FROM_OUTSIDE, *_NEVER_RAN, *_LAST_WORDS, *_START_ERRORS, *_EXIT_CODES)
TABLE = (*_ENDINGS, *_NEVER_STARTS)
