"""Pods whose end has begun, one or more for every such row of the classifier's table. Used by the tests of the
classifier and of docs/failures.md."""

import json

from tests.unit.kubelet_statuses import (
    FailedPod,
    by_kubelet,
    container,
    exited,
    lost,
    of_entrypoint,
    placed,
    refused,
    runc,
    running,
)
from tests.unit.pods import deleted, disrupted, pod, with_status
from tpu_training_operator.api import constants

TRACEBACK = "Traceback (most recent call last):\n  File \"/app/task.py\", line 12, in loss\nKeyError: 'label'"
SAID = json.dumps({"outcome": "UserError", "message": TRACEBACK, "step": 120})


def unfit(host: str, message: str) -> str:
    """The last words of a worker that failed a line of the slice check about `host`, or about the slice."""
    line = {"host": host} if host else {}
    return json.dumps({"outcome": "SliceUnfit", "message": message, "sliceCheck": line | {"name": "a line"}})


STOPPED = json.dumps({"outcome": "Preempted", "message": "stopped on request after 3 steps", "step": 3})
SHUTDOWN = "Pod was terminated in response to imminent node shutdown."
LOW = "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 9Gi. "
TOO_MUCH = "Pod ephemeral local storage usage exceeds the total limit of containers 20Gi. "
BUSY = (
    "RuntimeError: Bad StatusOr access: UNKNOWN: TPU initialization failed: open(/dev/vfio/0): Device or resource "
    "busy: Device or resource busy; Couldn't open iommu group /dev/vfio/0"
)
UNHEALTHY = "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices google.com/tpu"
GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error: Connection reset by peer"
LOADER = "RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly"
NOT_ALLOWED = (
    "the worker's user may not open the chips; set trainer.securityContext (runAsUser: 0, or the device's group in"
    " supplementalGroups)"
)
SHM_FULL = "/dev/shm is full; raise trainer.sharedMemory or leave it out, or use fewer loader processes"
NO_CPU = "Node didn't have enough resource: cpu, requested: 4000, used: 110000, capacity: 112000"
NO_CONTAINER = "The container could not be located when the pod was terminated"
FORGOTTEN = {
    "exitCode": 137,
    "finishedAt": None,
    "message": NO_CONTAINER,
    "reason": "ContainerStatusUnknown",
    "startedAt": None,
}
EARLY = (
    "the worker exited with code 0 before the training had ended: something in the task ended the process (os._exit)"
)
OOM = "the worker used more memory than its limit"
DELETED = "the pod was deleted while the gang was running"
CRITICAL = "Pod was preempted by Kubelet to accommodate a critical pod."
HIGHER_PRIORITY = "default-scheduler: preempting to accommodate a higher priority pod"
DEVICE_TAINT = "Device Taint manager: deleting due to NoExecute taint"
NO_PROGRAM = (
    'unable to start container process: error during container init: exec: "train": executable file not found in $PATH'
)
NO_DIRECTORY = "unable to start container process: error during container init: mkdir /etc/passwd: not a directory"
READ_ONLY_NODE = (
    "failed to create containerd task: failed to create shim task: "
    "mkdir /run/containerd/io.containerd.runtime.v2.task/k8s.io/8d2: read-only file system"
)
NO_NAMESPACE = "unable to create new parent process: namespace path: lstat /proc/0/ns/ipc: no such file or directory"

DISRUPTED = (
    FailedPod(
        "preempted by the scheduler",
        deleted(disrupted(exited(143), "PreemptionByScheduler", after=5, message=HIGHER_PRIORITY), after=5),
        "Preemption",
        "PreemptionByScheduler",
        HIGHER_PRIORITY,
    ),
    FailedPod(
        "evicted through the API, as a drain does",
        deleted(disrupted(exited(75), "EvictionByEvictionAPI", after=5, message="Eviction API: evicting"), after=5),
        "Preemption",
        "EvictionByEvictionAPI",
        "Eviction API: evicting",
    ),
    FailedPod(
        "on a node that no longer answers",
        lost("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"),
        "Infrastructure",
        "NodeLost",
        "Taint manager: deleting due to NoExecute taint",
    ),
    FailedPod(
        "on a node that is no longer there",
        with_status(lost("DeletionByPodGC", "PodGC: node no longer exists"), phase="Failed"),
        "Infrastructure",
        "NodeLost",
        "PodGC: node no longer exists",
    ),
    FailedPod(
        "stopped by the shutdown of its node",
        by_kubelet(exited(143), "Terminated", SHUTDOWN, SHUTDOWN),
        "Preemption",
        "NodeShutdown",
        SHUTDOWN,
    ),
    FailedPod(
        "stopped by the shutdown of its node, by a kubelet that sets no condition",
        by_kubelet(exited(137), "Shutdown", "Node is shutting, evicting pods"),
        "Preemption",
        "NodeShutdown",
        "Node is shutting, evicting pods",
    ),
    FailedPod(
        "refused by a node that shuts down",
        refused("NodeShutdown", "Pod was rejected as the node is shutting down."),
        "Preemption",
        "NodeShutdown",
        "Pod was rejected: Pod was rejected as the node is shutting down.",
    ),
    FailedPod(
        "evicted for more storage than its own limit",
        by_kubelet(exited(137), "Evicted", TOO_MUCH),
        "Unknown",
        "StorageLimitExceeded",
        TOO_MUCH,
    ),
    FailedPod(
        "evicted by a node that is short of something",
        by_kubelet(exited(137), "Evicted", LOW, LOW),
        "Infrastructure",
        "Evicted",
        LOW,
    ),
    FailedPod(
        "stopped for a critical pod",
        by_kubelet(exited(143), "Preempting", "Preempted in order to admit critical pod", CRITICAL),
        "Preemption",
        "PreemptedByKubelet",
        "Preempted in order to admit critical pod",
    ),
    FailedPod(
        "disrupted for a reason that a later Kubernetes has",
        deleted(disrupted(exited(143), "DeletionByDeviceTaintManager", after=5, message=DEVICE_TAINT), after=5),
        "Preemption",
        "DeletionByDeviceTaintManager",
        DEVICE_TAINT,
    ),
)
ENDED_FROM_OUTSIDE = (
    FailedPod("out of memory", exited(137, reason="OOMKilled"), "OutOfMemory", "OOMKilled", OOM),
    FailedPod(
        "out of memory, with the end of its log",
        exited(137, "step 120 loss 0.3", reason="OOMKilled"),
        "OutOfMemory",
        "OOMKilled",
        f"{OOM}: step 120 loss 0.3",
    ),
    FailedPod("deleted, and stopping", deleted(running(), after=5), "Infrastructure", "PodDeleted", DELETED),
    FailedPod("deleted, and stopped", deleted(exited(75), after=5), "Infrastructure", "PodDeleted", DELETED),
    FailedPod("deleted before it had a node", deleted(pod(), after=5), "Infrastructure", "PodDeleted", DELETED),
    FailedPod(
        "on a node that has restarted",
        exited(255, "step 120 loss 0.3", reason="Unknown"),
        "Infrastructure",
        "ContainerStatusUnknown",
        "the node lost track of the container, as happens when a node restarts: step 120 loss 0.3",
    ),
    FailedPod(
        "on a node that has restarted, and whose runtime has forgotten the container",
        placed(phase="Failed", containerStatuses=[container({"terminated": FORGOTTEN})]),
        "Infrastructure",
        "ContainerStatusUnknown",
        f"the node lost track of the container, as happens when a node restarts: {NO_CONTAINER}",
    ),
)
NEVER_RAN = (
    FailedPod(
        "refused by a node without healthy chips",
        refused("UnexpectedAdmissionError", f"{UNHEALTHY}, which is unexpected"),
        "Infrastructure",
        "DevicesUnhealthy",
        f"Pod was rejected: {UNHEALTHY}, which is unexpected",
    ),
    FailedPod(
        "refused by the device plugin",
        refused("UnexpectedAdmissionError", "Allocate failed due to rpc error: code = Unavailable"),
        "Infrastructure",
        "UnexpectedAdmissionError",
        "Pod was rejected: Allocate failed due to rpc error: code = Unavailable",
    ),
    FailedPod(
        "refused by a node without room",
        refused("OutOfcpu", NO_CPU),
        "Infrastructure",
        "OutOfcpu",
        f"Pod was rejected: {NO_CPU}",
    ),
    FailedPod(
        "refused by a node that has changed",
        refused("NodeAffinity", "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"),
        "Infrastructure",
        "NodeAffinity",
        "Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
    ),
    FailedPod(
        "refused by a node that has restarted since",
        with_status(refused("OutOfcpu", NO_CPU), containerStatuses=[container({"terminated": FORGOTTEN})]),
        "Infrastructure",
        "OutOfcpu",
        f"Pod was rejected: {NO_CPU}",
    ),
    FailedPod(
        "behind a container that a webhook has added, and that failed",
        placed(
            phase="Failed",
            initContainerStatuses=[container({"terminated": {"exitCode": 3, "message": "no bucket"}}, "mount")],
            containerStatuses=[container({"waiting": {"reason": "PodInitializing"}})],
        ),
        "Unknown",
        "SidecarFailed",
        "container mount exited with code 3: no bucket",
    ),
    FailedPod(
        "failed without a word", with_status(pod(), phase="Failed"), "Infrastructure", "PodFailed", "the pod failed"
    ),
)
LAST_WORDS = (
    FailedPod("a chip that another process holds", exited(1, BUSY), "Infrastructure", "DeviceBusy", BUSY),
    FailedPod(
        "a chip that another process holds, as Python tells it",
        exited(70, "OSError: [Errno 16] Device or resource busy: '/dev/accel0'"),
        "Infrastructure",
        "DeviceBusy",
        "OSError: [Errno 16] Device or resource busy: '/dev/accel0'",
    ),
    FailedPod(
        "a chip that another process holds, by an older libtpu",
        exited(1, "open(/dev/accel0): Device or resource busy; no driver instance"),
        "Infrastructure",
        "DeviceBusy",
        "open(/dev/accel0): Device or resource busy; no driver instance",
    ),
    FailedPod(
        "no chip",
        exited(1, "UNKNOWN: TPU initialization failed: No ba16c7433 device found."),
        "Infrastructure",
        "DeviceFailed",
        "UNKNOWN: TPU initialization failed: No ba16c7433 device found.",
    ),
    FailedPod(
        "a chip that does not answer",
        exited(1, "TPU initialization failed: open(/dev/vfio/2): Input/output error"),
        "Infrastructure",
        "DeviceFailed",
        "TPU initialization failed: open(/dev/vfio/2): Input/output error",
    ),
    *(
        FailedPod(f"a chip that its user may not open: {said}", exited(1, said), "UserError", "DeviceDenied", message)
        for said in (
            "TPU initialization failed: open(/dev/accel0): Operation not permitted",
            "PermissionError: [Errno 13] Permission denied: '/dev/vfio/0'",
            "Couldn't open /dev/vfio/vfio: Permission denied",
        )
        for message in (f"{NOT_ALLOWED}: {said}",)
    ),
    *(
        FailedPod(f"a full /dev/shm: {said}", exited(1, said), "UserError", "SharedMemoryFull", f"{SHM_FULL}: {said}")
        for said in (
            "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory"
            " (shm).",
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that"
            " dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error.",
            "RuntimeError: unable to write to file </torch_7_1234_0>: No space left on device (28)",
        )
    ),
    FailedPod(
        "a loader process that says nothing",
        exited(1, LOADER),
        "UserError",
        "LoaderLost",
        "a loader process (Task.workers, num_workers) was killed; if the log says Bus error, raise"
        f" trainer.sharedMemory: {LOADER}",
    ),
)
START_ERRORS = (
    FailedPod(
        "a command that is not in the image",
        exited(128, runc(NO_PROGRAM), reason="StartError"),
        "UserError",
        "CannotStart",
        runc(NO_PROGRAM),
    ),
    FailedPod(
        "a working directory that is a file",
        exited(128, runc(NO_DIRECTORY), reason="StartError"),
        "UserError",
        "CannotStart",
        runc(NO_DIRECTORY),
    ),
    FailedPod(
        "a container that the runtime could not start",
        exited(128, runc(NO_NAMESPACE), reason="StartError"),
        "Unknown",
        "StartError",
        runc(NO_NAMESPACE),
    ),
    FailedPod(
        "a node whose own disk cannot be written to",
        exited(128, READ_ONLY_NODE, reason="StartError"),
        "Unknown",
        "StartError",
        READ_ONLY_NODE,
    ),
)
EXIT_CODES = (
    FailedPod(
        "a task that ends the process in the middle of the training",
        of_entrypoint(with_status(exited(0, reason="Completed"), phase="Succeeded")),
        "UserError",
        "ExitedEarly",
        EARLY,
    ),
    FailedPod(
        "the same after a check of the slice",
        of_entrypoint(
            with_status(exited(0, reason="Completed"), phase="Succeeded"), constants.FAST_SLICE_CHECK_COMMAND
        ),
        "UserError",
        "ExitedEarly",
        EARLY,
    ),
    FailedPod(
        "the same beside a sidecar",
        of_entrypoint(with_status(exited(0, reason="Completed"), phase="Running")),
        "UserError",
        "ExitedEarly",
        EARLY,
    ),
    FailedPod(
        "a task whose exit handler replaces the trainer's exit code",
        of_entrypoint(with_status(exited(0, SAID, reason="Completed"), phase="Succeeded")),
        "UserError",
        "UserError",
        TRACEBACK,
    ),
    FailedPod(
        "the same after a stop",
        of_entrypoint(with_status(exited(0, STOPPED, reason="Completed"), phase="Succeeded")),
        "Preemption",
        "Preempted",
        "stopped on request after 3 steps",
    ),
    FailedPod("a peer that is lost to a loop of the user's own", exited(1, GLOO), "Infrastructure", "PeerLost", GLOO),
    FailedPod("an error of the user's", exited(1, SAID), "UserError", "UserError", TRACEBACK),
    FailedPod("an unusable run spec", exited(78, "no run spec"), "UserError", "BadSpec", "no run spec"),
    FailedPod("a lost peer", exited(69), "Infrastructure", "PeerLost", "the worker exited with code 69"),
    FailedPod("an error of the trainer's", exited(70), "Unknown", "InternalError", "the worker exited with code 70"),
    FailedPod("a hang that the trainer saw", exited(71), "Hang", "Hung", "the worker exited with code 71"),
    FailedPod("an unfit slice", exited(72), "Infrastructure", "SliceUnfit", "the worker exited with code 72"),
    FailedPod(
        "a slice that cannot train, by no fault of this host",
        exited(72, unfit("", "sum: 3, expected 4")),
        "Infrastructure",
        "SliceUnfit",
        "sum: 3, expected 4",
    ),
    FailedPod(
        "a host that cannot train",
        exited(72, unfit("digits-1-0-0", "matrix product: 9 TFLOP/s, expected 150")),
        "Infrastructure",
        "HostUnfit",
        "matrix product: 9 TFLOP/s, expected 150",
    ),
    FailedPod("no storage", exited(74), "Infrastructure", "StorageFailed", "the worker exited with code 74"),
    FailedPod("a loss of no number", exited(65), "NotFinite", "NotFinite", "the worker exited with code 65"),
    FailedPod("lost checkpoints", exited(66), "UserError", "CheckpointUnusable", "the worker exited with code 66"),
    FailedPod("no right to the storage", exited(77), "UserError", "StorageDenied", "the worker exited with code 77"),
    FailedPod("replicas that came apart", exited(76), "Unknown", "Diverged", "the worker exited with code 76"),
    FailedPod("told to stop", exited(75), "Preemption", "Preempted", "the worker exited with code 75"),
    FailedPod("wrong arguments", exited(2, "usage: train.py"), "UserError", "UserError", "usage: train.py"),
    FailedPod(
        "a script that is not executable", exited(126), "UserError", "CannotStart", "the worker exited with code 126"
    ),
    FailedPod(
        "a command that the shell did not find",
        exited(127, "sh: 1: torchrum: not found"),
        "UserError",
        "CannotStart",
        "sh: 1: torchrum: not found",
    ),
    FailedPod("killed", exited(137), "Infrastructure", "Killed", "the worker was killed (exit code 137)"),
    FailedPod(
        "told to end by somebody else",
        exited(143, "step 9"),
        "Infrastructure",
        "Killed",
        "the worker was killed (exit code 143): step 9",
    ),
    FailedPod("a crash", exited(139), "Unknown", "Crashed", "the worker was ended by SIGSEGV (exit code 139)"),
    FailedPod("any other code", exited(3, "bad luck"), "Unknown", "ExitCode", "bad luck"),
    FailedPod("a code without a signal", exited(255), "Unknown", "ExitCode", "the worker exited with code 255"),
    FailedPod(
        "an error while a sidecar still runs",
        with_status(exited(1, "ValueError: 3"), phase="Running"),
        "UserError",
        "UserError",
        "ValueError: 3",
    ),
)
ENDED = (*DISRUPTED, *ENDED_FROM_OUTSIDE, *NEVER_RAN, *LAST_WORDS, *START_ERRORS, *EXIT_CODES)
