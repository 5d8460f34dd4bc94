"""Reads what Kubernetes writes into a pod when something goes wrong.

Names and texts come from Kubernetes 1.35 (pkg/kubelet: eviction, preemption, nodeshutdown, lifecycle, images,
kuberuntime, devicemanager; pkg/controller: tainteviction, podgc) and containerd, whose errors the kubelet hands on.
"""

from datetime import datetime, timedelta

from tpu_training_operator.api import constants
from tpu_training_operator.domain.cluster_state.observed import Object, WorkerPod, parse_time

# Reasons of the condition DisruptionTarget when the control plane has given up on a node.
TAINT_EVICTION = "DeletionByTaintManager"
NODE_GONE = "DeletionByPodGC"

# The end of a container and the condition that announces it come from different clocks.
_CLOCKS_DIFFER = timedelta(seconds=5)
# A pod may be deleted with a grace period of thousands of years.
_LONGEST_GRACE = timedelta(days=36500)


def status_reason(pod: WorkerPod) -> str:
    """Returns why the kubelet ended or refused the pod; empty if a container simply ended."""
    return str(pod.raw.get("status", {}).get("reason") or "")


def status_message(pod: WorkerPod) -> str:
    return str(pod.raw.get("status", {}).get("message") or "")


def has_failed(pod: WorkerPod) -> bool:
    """Tells whether the worker has begun to end without success.

    The exit code decides, because a sidecar that still runs keeps the pod's phase at Running.
    """
    if left_early(pod) or failed_with_code_0(pod) or was_stopped(pod):
        return True
    if pod.phase == "Succeeded":
        return False
    return pod.phase == "Failed" or bool(pod.exit_code) or (pod.is_terminating and pod.exit_code != 0)


def left_early(pod: WorkerPod) -> bool:
    """Tells whether the trainer's process exited with code 0 but without the last words that a finished trainer leaves.

    Something in the task ended it (os._exit, a library), so the training is not done. This does not apply to a loop of
    the user's own, which leaves no last words. Only an empty message counts: with exit code 0 the kubelet does not
    replace it, and a message that the kubelet could not read or had to cut is not empty.
    """
    return pod.exit_code == 0 and not str(pod.termination.get("message") or "").strip() and pod.runs_trainer


def failed_with_code_0(pod: WorkerPod) -> bool:
    """Tells whether the trainer's last words report a failure or a stop although its process exited with code 0.

    Something that ran after the trainer replaced the exit code, such as an atexit handler that calls os._exit.
    """
    message = pod.trainer_message if pod.exit_code == 0 and pod.runs_trainer else None
    return message is not None and message.outcome not in (None, "Succeeded")


def was_stopped(pod: WorkerPod) -> bool:
    """Tells whether a loop of the user's own exited with code 0 after its deletion or disruption had begun.

    Many programs exit with 0 when SIGTERM stops them, so the training may not be done. If the order of the two events
    is uncertain, training again from the last checkpoint does less harm than a false success. The trainer has its own
    exit code for being stopped.
    """
    ended_well = pod.phase == "Succeeded" or pod.exit_code == 0
    if not ended_well or pod.runs_trainer:
        return False
    asked, ended = deletion_requested_at(pod), ended_at(pod)
    is_deleted = asked is not None and (ended is None or asked <= ended + _CLOCKS_DIFFER)
    return is_deleted or is_disrupted(pod)


def has_succeeded(pod: WorkerPod) -> bool:
    return pod.phase == "Succeeded" and not has_failed(pod)


def deletion_requested_at(pod: WorkerPod) -> datetime | None:
    """Returns when the deletion was requested, or None. The pod's own timestamp is the end of the grace period."""
    metadata = pod.raw["metadata"]
    if not (ends := metadata.get("deletionTimestamp")):
        return None
    return parse_time(ends) - min(timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0), _LONGEST_GRACE)


def ended_at(pod: WorkerPod) -> datetime | None:
    """Returns when the worker's container ended; None before that, or if the kubelet cannot know."""
    return _known(pod, pod.termination.get("finishedAt"))


def ended_by(pod: WorkerPod) -> datetime | None:
    """Returns the time by which the pod had certainly ended according to its kubelet; None if it gives none."""
    ready = pod.condition("Ready")
    not_ready = _known(pod, ready.get("lastTransitionTime")) if ready.get("status") == "False" else None
    return max((moment for moment in (ended_at(pod), not_ready) if moment), default=None)


def has_started(pod: WorkerPod) -> bool:
    """Tells whether the worker's container runs or has run. If it could not start, its start time is in 1970."""
    runs = (pod.container.get("state") or {}).get("running") is not None
    return runs or started_at(pod) is not None


def started_at(pod: WorkerPod) -> datetime | None:
    """Returns when the worker's container started; None before that, or if its kubelet does not say."""
    state = pod.container.get("state") or {}
    return _known(pod, (state.get("running") or state.get("terminated") or {}).get("startedAt"))


def _known(pod: WorkerPod, time: str | None) -> datetime | None:
    """Converts a time of the worker's container to the control plane's clock; None for 1970, which means unknown."""
    if not time:
        return None
    moment = parse_time(time) + _lag(pod)
    created = pod.raw["metadata"].get("creationTimestamp")
    return None if created and moment < parse_time(created) else moment


def _lag(pod: WorkerPod) -> timedelta:
    """Returns how far the node's clock is visibly behind: a kubelet cannot accept a pod before it was scheduled."""
    accepted = pod.raw.get("status", {}).get("startTime")
    scheduled = pod.condition("PodScheduled").get("lastTransitionTime")
    if not accepted or not scheduled:
        return timedelta(0)
    return max(timedelta(0), parse_time(scheduled) - parse_time(accepted))


def disruption(pod: WorkerPod) -> Object:
    """Returns the condition DisruptionTarget, or Kueue's TerminationTarget; empty if the pod has none.

    One that came after the worker's own end does not count: a worker that has failed may still be evicted when its node
    is removed or drained.
    """
    announced_by = (pod.condition(kind) for kind in ("DisruptionTarget", "TerminationTarget"))
    condition = next((known for known in announced_by if known.get("status") == "True"), None)
    if condition is None:
        return {}
    ended, announced = ended_at(pod), condition.get("lastTransitionTime")
    came_late = ended and announced and parse_time(announced) > ended + _CLOCKS_DIFFER
    return {} if came_late else condition


def is_disrupted(pod: WorkerPod) -> bool:
    return bool(disruption(pod))


def is_held_up(pod: WorkerPod) -> bool:
    return bool(pod.waiting()[0])


def failed_sidecar(pod: WorkerPod) -> str:
    """Describes how a container other than the worker's failed; empty if none did."""
    for container in (*pod.init_containers, *pod.containers):
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode") and container.get("name") != constants.CONTAINER_NAME:
            words = str(ended.get("message") or "").strip()
            return f"container {container.get('name')} exited with code {ended['exitCode']}" + (words and f": {words}")
    return ""


def was_deleted_first(pod: WorkerPod) -> bool:
    """Tells whether the pod's deletion was requested before it ended."""
    asked, ended = deletion_requested_at(pod), ended_at(pod)
    if asked is None:
        return False
    if was_stopped(pod):
        return True
    return ended > asked if ended else pod.phase != "Failed"
