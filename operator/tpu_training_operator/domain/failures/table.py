"""What class of failure a worker's end is: one table, the surest sign first.

docs/failures.md says of every reason what it means and what a person should do; a test holds the two together.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, auto

from tpu_training_operator.api.failures import ExitCode, FailureReason
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.trainer import SHARED_MEMORY
from tpu_training_operator.domain.failures import error_texts as texts
from tpu_training_operator.domain.failures.last_words import cut, last_words, with_ending
from tpu_training_operator.domain.failures.pod_signs import (
    NODE_GONE,
    TAINT_EVICTION,
    Sign,
    both,
    deleted_first,
    disrupted_by,
    disruption,
    ended_by_kubelet,
    exited_with,
    failed_sidecar,
    has_failed,
    is_disrupted,
    is_held_up,
    kubelet_says,
    left_early,
    mentions,
    never_ran,
    status_message,
    status_reason,
    terminated_as,
    waits_as,
)
from tpu_training_operator.domain.observed import WorkerPod

EXIT_CODE_CLASSES = {
    ExitCode.USER_ERROR: (FailureClass.USER_ERROR, "UserError"),
    ExitCode.NOT_FINITE: (FailureClass.NOT_FINITE, "NotFinite"),
    ExitCode.PEER_LOST: (FailureClass.INFRASTRUCTURE, "PeerLost"),
    ExitCode.INTERNAL_ERROR: (FailureClass.UNKNOWN, "InternalError"),
    ExitCode.HUNG: (FailureClass.HANG, "Hung"),
    ExitCode.STORAGE_FAILED: (FailureClass.INFRASTRUCTURE, "StorageFailed"),
    ExitCode.PREEMPTED: (FailureClass.PREEMPTION, "Preempted"),
    # The same program on the same data once more: a chip that computes wrongly is a matter of the node it was on.
    ExitCode.DIVERGED: (FailureClass.UNKNOWN, FailureReason.DIVERGED),
    ExitCode.STORAGE_DENIED: (FailureClass.USER_ERROR, FailureReason.STORAGE_DENIED),
    ExitCode.BAD_SPEC: (FailureClass.USER_ERROR, "BadSpec"),
}

# The reasons that speak against a node's chips rather than against the node or the network.
DEVICE_FAULTS = frozenset({FailureReason.DEVICE_BUSY, FailureReason.DEVICE_FAILED, FailureReason.DEVICES_UNHEALTHY})

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


class Doubt(Enum):
    """Whether an end may be the consequence of another worker's."""

    NONE = auto()
    IN_OWN_LOOP = auto()
    """It may where the loop is the user's own: its exit code does not tell a lost peer from an error."""
    LOST_PEER = auto()
    """The worker says that it is."""


@dataclass(frozen=True)
class Row:
    """A sign, and what it means. `patience` is for a pod that has its node and does not start: how long after it got
    there this is no longer a matter of time. None: the row is for pods whose end has begun."""

    reason: str | Callable[[WorkerPod], str]
    failure_class: FailureClass
    sign: Sign
    words: Callable[[WorkerPod], str]
    patience: timedelta | None = None
    doubt: Doubt = Doubt.NONE

    def reason_for(self, pod: WorkerPod) -> str:
        return self.reason if isinstance(self.reason, str) else self.reason(pod)

    def message_for(self, pod: WorkerPod) -> str:
        return cut(self.words(pod))


def classify(pod: WorkerPod) -> Row | None:
    """The row that fits; None for a pod that is well, or waits for nothing but its turn."""
    # Most pods of a gang are well, and have but one question asked.
    rows = _ENDINGS if has_failed(pod) else _NEVER_STARTS if is_held_up(pod) else ()
    return next((row for row in rows if row.sign(pod)), None)


def with_started_peers(row: Row) -> Row:
    """The row for a worker of a gang in which another has started.

    One image and one spec are everybody's, so they are good, and what keeps this worker from starting is its node's,
    or a moment's.
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


def _announced(pod: WorkerPod) -> str:
    return str(disruption(pod).get("message") or status_message(pod) or "the pod was disrupted")


def _kubelet_said(pod: WorkerPod) -> str:
    return status_message(pod) or "the kubelet gives no message"


def _container_waits(pod: WorkerPod) -> str:
    reason, message = pod.waiting()
    return message or f"the container waits in {reason}"


def _said_or_code(pod: WorkerPod) -> str:
    return last_words(pod) or f"the worker exited with code {pod.exit_code}"


def _then_last_words(what: str) -> Callable[[WorkerPod], str]:
    return lambda pod: with_ending(what, last_words(pod))


def _killed(pod: WorkerPod) -> str:
    return with_ending(f"the worker was killed (exit code {pod.exit_code})", last_words(pod))


def _crashed(pod: WorkerPod) -> str:
    what = f"the worker was ended by {_SIGNALS.get(pod.exit_code or 0)} (exit code {pod.exit_code})"
    return with_ending(what, last_words(pod))


def _always(_: WorkerPod) -> bool:
    return True


DELETED_WHILE_RUNNING = "the pod was deleted while the gang was running"
_FORGOTTEN = "the node lost sight of the container, as after a restart"
_OTHERS_STARTED = "other workers started with the same image and spec, this one did not"
_EXITED_EARLY = (
    "the worker exited with code 0 before the training had ended: something in the task ended the process (os._exit)"
)
_OUT_OF_MEMORY = "the worker used more memory than its limit"
_NO_RIGHT_TO_CHIPS = (
    "the worker's user may not open the chips; set trainer.securityContext (runAsUser: 0, or the device's group in"
    " supplementalGroups)"
)
_SHARED_MEMORY_FULL = (
    f"{SHARED_MEMORY} is full; raise trainer.sharedMemory or leave it out, or use fewer loader processes"
)
_LOADER_LOST = (
    "a loader process (Task.workers, num_workers) was killed; if the log says Bus error, raise trainer.sharedMemory"
)
_ROOT_IMAGE = (
    "the image's user is root, or is known by name only; set trainer.securityContext.runAsUser to the number of the"
    " user to run as (0 for root)"
)

_PULLS = waits_as(
    "ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"
)
_CREATES = waits_as(
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError", "PreStartHookError"
)
_USER, _INFRASTRUCTURE, _PREEMPTION, _UNKNOWN = (
    FailureClass.USER_ERROR,
    FailureClass.INFRASTRUCTURE,
    FailureClass.PREEMPTION,
    FailureClass.UNKNOWN,
)

_DISRUPTED = (
    Row("NodeLost", _INFRASTRUCTURE, disrupted_by(TAINT_EVICTION, NODE_GONE), _announced),
    # The kubelet gives one reason to all that it ends, in the condition; which it was stands in the pod's.
    Row("NodeShutdown", _PREEMPTION, kubelet_says("Terminated", "NodeShutdown", "Shutdown"), _kubelet_said),
    # The pod's own limit: the next node would do the same.
    Row(
        "StorageLimitExceeded",
        _UNKNOWN,
        both(kubelet_says("Evicted"), mentions(texts.OWN_STORAGE_LIMIT)),
        _kubelet_said,
    ),
    Row("Evicted", _INFRASTRUCTURE, kubelet_says("Evicted"), _kubelet_said),
    Row("PreemptedByKubelet", _PREEMPTION, kubelet_says("Preempting"), _kubelet_said),
    # PreemptionByScheduler, EvictionByEvictionAPI and whatever comes: somebody wanted the node.
    Row(lambda pod: str(disruption(pod).get("reason") or "Disrupted"), _PREEMPTION, is_disrupted, _announced),
)
_ENDED_FROM_OUTSIDE = (
    Row("OOMKilled", FailureClass.OUT_OF_MEMORY, terminated_as("OOMKilled"), _then_last_words(_OUT_OF_MEMORY)),
    Row(
        FailureReason.DEVICES_UNHEALTHY,
        _INFRASTRUCTURE,
        both(kubelet_says("UnexpectedAdmissionError"), mentions(texts.UNHEALTHY_CHIPS)),
        _kubelet_said,
    ),
    # OutOfcpu, NodeAffinity, TopologyAffinityError and whatever else a kubelet refuses a pod for: a matter of the node.
    Row(status_reason, _INFRASTRUCTURE, ended_by_kubelet, _kubelet_said),
    Row(FailureReason.POD_DELETED, _INFRASTRUCTURE, deleted_first, _then_last_words(DELETED_WHILE_RUNNING)),
    # The node has restarted: containerd knows nothing of the end (code 255), or the kubelet finds no container.
    Row(
        "ContainerStatusUnknown",
        _INFRASTRUCTURE,
        terminated_as("ContainerStatusUnknown", "Unknown"),
        _then_last_words(_FORGOTTEN),
    ),
)
_NEVER_RAN = (
    Row("SidecarFailed", _UNKNOWN, both(never_ran, lambda pod: bool(failed_sidecar(pod))), failed_sidecar),
    Row("PodFailed", _INFRASTRUCTURE, never_ran, lambda pod: status_message(pod) or "the pod failed"),
)
_LAST_WORDS = (
    Row(FailureReason.DEVICE_BUSY, _INFRASTRUCTURE, mentions(texts.CHIP_BUSY), last_words),
    Row(FailureReason.DEVICE_FAILED, _INFRASTRUCTURE, mentions(texts.CHIP_BROKEN), last_words),
    Row("DeviceDenied", _USER, mentions(texts.CHIP_DENIED), _then_last_words(_NO_RIGHT_TO_CHIPS)),
    Row("SharedMemoryFull", _USER, mentions(texts.SHARED_MEMORY_FULL), _then_last_words(_SHARED_MEMORY_FULL)),
    Row("LoaderLost", _USER, mentions(texts.LOADER_LOST), _then_last_words(_LOADER_LOST)),
)
_START_ERRORS = (
    Row(
        "CannotStart",
        _USER,
        both(terminated_as("StartError", "ContainerCannotRun"), mentions(texts.NO_PROGRAM)),
        last_words,
    ),
    Row("StartError", _UNKNOWN, terminated_as("StartError", "ContainerCannotRun"), _said_or_code),
)
_EXIT_CODES = (
    Row("ExitedEarly", _USER, left_early, lambda _: _EXITED_EARLY),
    *(
        Row(
            reason,
            failure_class,
            exited_with(code),
            _said_or_code,
            doubt=Doubt.LOST_PEER if code is ExitCode.PEER_LOST else Doubt.IN_OWN_LOOP,
        )
        for code, (failure_class, reason) in EXIT_CODE_CLASSES.items()
    ),
    # Python and most programs: wrong arguments. The shell: found and not executable, and not found.
    Row("UserError", _USER, exited_with(2), _said_or_code, doubt=Doubt.IN_OWN_LOOP),
    Row("CannotStart", _USER, exited_with(126, 127), _said_or_code, doubt=Doubt.IN_OWN_LOOP),
    # 128 + SIGKILL and 128 + SIGTERM: ended from outside, not by the program.
    Row("Killed", _INFRASTRUCTURE, exited_with(137, 143), _killed),
    Row("Crashed", _UNKNOWN, exited_with(*_SIGNALS), _crashed, doubt=Doubt.IN_OWN_LOOP),
    Row("ExitCode", _UNKNOWN, _always, _said_or_code, doubt=Doubt.IN_OWN_LOOP),
)
_NEVER_STARTS = (
    Row("InvalidImageName", _USER, waits_as("InvalidImageName"), _container_waits, _AT_ONCE),
    Row("ErrImageNeverPull", _USER, waits_as("ErrImageNeverPull"), _container_waits, _AT_ONCE),
    Row("ImagePullDenied", _USER, both(_PULLS, mentions(texts.NO_ACCESS)), _container_waits, _CREDENTIALS),
    # Ten seconds after the first error the kubelet backs off and says why. Before Kubernetes 1.32 it does not say.
    Row(
        "ImageNotFound", _USER, both(waits_as("ImagePullBackOff"), mentions(texts.NO_IMAGE)), _container_waits, _AT_ONCE
    ),
    Row("ImageNotFound", _USER, both(_PULLS, mentions(texts.NO_IMAGE)), _container_waits, _MOMENT),
    Row("ImagePullFailed", _INFRASTRUCTURE, _PULLS, _container_waits, _RETRIES),
    Row(
        FailureReason.DEVICE_FAILED,
        _INFRASTRUCTURE,
        both(_CREATES, mentions(texts.CHIP_BROKEN)),
        _container_waits,
        _MOMENT,
    ),
    Row("ContainerNotCreated", _INFRASTRUCTURE, both(_CREATES, mentions(texts.MAY_HEAL)), _container_waits, _RETRIES),
    Row("CannotStart", _USER, both(_CREATES, mentions(texts.NO_PROGRAM)), _container_waits, _MOMENT),
    Row(
        "RootImage",
        _USER,
        both(waits_as("CreateContainerConfigError"), mentions(texts.ROOT_IMAGE)),
        lambda pod: with_ending(_ROOT_IMAGE, _container_waits(pod)),
        _AT_ONCE,
    ),
    Row("CreateContainerConfigError", _USER, waits_as("CreateContainerConfigError"), _container_waits, _MOMENT),
    Row(lambda pod: pod.waiting()[0], _UNKNOWN, _CREATES, _container_waits, _MOMENT),
)
_DOES_NOT_START = (*_START_ERRORS, *_NEVER_STARTS)
_ENDINGS = (*_DISRUPTED, *_ENDED_FROM_OUTSIDE, *_NEVER_RAN, *_LAST_WORDS, *_START_ERRORS, *_EXIT_CODES)
TABLE = (*_ENDINGS, *_NEVER_STARTS)
