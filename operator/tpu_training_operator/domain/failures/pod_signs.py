"""What Kubernetes writes into a pod when something goes wrong: readers, and the signs of the classifier's table.

The names and texts are those of Kubernetes 1.35 (pkg/kubelet: eviction, preemption, nodeshutdown, lifecycle, images,
kuberuntime, devicemanager; pkg/controller: tainteviction, podgc) and of containerd, whose errors the kubelet hands on.
"""

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import lru_cache

from tpu_training_operator.api import constants
from tpu_training_operator.domain.failures.last_words import last_words
from tpu_training_operator.domain.observed import Object, WorkerPod, parse_time

# Reasons of the condition DisruptionTarget when the control plane has given up on a node.
TAINT_EVICTION = "DeletionByTaintManager"
NODE_GONE = "DeletionByPodGC"

Sign = Callable[[WorkerPod], bool]

# Two clocks write the end of a container and the condition that announces it.
_CLOCKS_DIFFER = timedelta(seconds=5)
# Characters searched at either end of a text: all that the kubelet takes from a log, and where errors stand.
_SEARCHED = 1024
# Whoever deletes a pod may give it thousands of years.
_LONGEST_GRACE = timedelta(days=36500)


def status_reason(pod: WorkerPod) -> str:
    """Why the kubelet ended the pod or refused it; empty where a container simply ended."""
    return str(pod.raw.get("status", {}).get("reason") or "")


def status_message(pod: WorkerPod) -> str:
    return str(pod.raw.get("status", {}).get("message") or "")


def has_failed(pod: WorkerPod) -> bool:
    """Its end has begun, and it is no success.

    The exit code counts by itself: a sidecar that still runs keeps the pod's phase at Running.
    """
    if left_early(pod) or was_stopped(pod):
        return True
    if pod.phase == "Succeeded":
        return False
    return pod.phase == "Failed" or bool(pod.exit_code) or (pod.is_terminating and pod.exit_code != 0)


def left_early(pod: WorkerPod) -> bool:
    """The trainer's process ended with exit code 0 and without the last words that it leaves at its end.

    The task has ended it (os._exit, a library): the training is not done. A loop of the user's own leaves no
    words. Only an empty message counts: with exit code 0 the kubelet puts nothing else in its place, and a message
    that it could not read or had to cut is not empty.
    """
    return pod.exit_code == 0 and not str(pod.termination.get("message") or "").strip() and pod.runs_trainer


def was_stopped(pod: WorkerPod) -> bool:
    """A loop of the user's own ended with exit code 0 after its deletion or disruption had begun.

    Many programs that stop cleanly on SIGTERM do that, so it does not say that the training is done. Where the end may
    lie before the deletion but not surely so, training again from the last checkpoint does less harm than a success
    that is none. The trainer exits with 75 when it stops early.
    """
    ended_well = pod.phase == "Succeeded" or pod.exit_code == 0
    if not ended_well or pod.runs_trainer:
        return False
    asked, ended = deletion_asked(pod), ended_at(pod)
    is_deleted = asked is not None and (ended is None or asked <= ended + _CLOCKS_DIFFER)
    return is_deleted or is_disrupted(pod)


def has_succeeded(pod: WorkerPod) -> bool:
    return pod.phase == "Succeeded" and not has_failed(pod)


def deletion_asked(pod: WorkerPod) -> datetime | None:
    """When somebody asked for the deletion; None where nobody has. The timestamp is the end of the grace period."""
    metadata = pod.raw["metadata"]
    if not (ends := metadata.get("deletionTimestamp")):
        return None
    return parse_time(ends) - min(timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0), _LONGEST_GRACE)


def ended_at(pod: WorkerPod) -> datetime | None:
    """When the worker's container ended; None before, and where the kubelet cannot know."""
    return _known(pod, pod.termination.get("finishedAt"))


def ended_by(pod: WorkerPod) -> datetime | None:
    """When the pod had surely ended, of all that its kubelet says of it; None where it says nothing."""
    ready = pod.condition("Ready")
    not_ready = _known(pod, ready.get("lastTransitionTime")) if ready.get("status") == "False" else None
    return max((moment for moment in (ended_at(pod), not_ready) if moment), default=None)


def has_started(pod: WorkerPod) -> bool:
    """The worker's container runs or has run. Of one that could not be started, the start is in 1970."""
    runs = (pod.container.get("state") or {}).get("running") is not None
    return runs or _known(pod, pod.termination.get("startedAt")) is not None


def _known(pod: WorkerPod, time: str | None) -> datetime | None:
    """A time of the worker's container, by the control plane's clock; a runtime that does not know it says 1970."""
    if not time:
        return None
    moment = parse_time(time) + _lag(pod)
    created = pod.raw["metadata"].get("creationTimestamp")
    return None if created and moment < parse_time(created) else moment


def _lag(pod: WorkerPod) -> timedelta:
    """How far the node's clock is behind, as far as that shows: no kubelet takes up a pod before it is scheduled."""
    taken_up = pod.raw.get("status", {}).get("startTime")
    scheduled = pod.condition("PodScheduled").get("lastTransitionTime")
    if not taken_up or not scheduled:
        return timedelta(0)
    return max(timedelta(0), parse_time(scheduled) - parse_time(taken_up))


def disruption(pod: WorkerPod) -> Object:
    """The condition DisruptionTarget; empty where there is none, or where it came after the worker's own end.

    A worker that has failed may still be evicted, when its node goes or somebody clears it.
    """
    condition = pod.condition("DisruptionTarget")
    if condition.get("status") != "True":
        return {}
    ended, announced = ended_at(pod), condition.get("lastTransitionTime")
    came_late = ended and announced and parse_time(announced) > ended + _CLOCKS_DIFFER
    return {} if came_late else condition


def is_held_up(pod: WorkerPod) -> bool:
    return bool(pod.waiting()[0])


def failed_sidecar(pod: WorkerPod) -> str:
    """How a container other than the worker's failed; empty where none did."""
    for container in (*pod.init_containers, *pod.containers):
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode") and container.get("name") != constants.CONTAINER_NAME:
            said = str(ended.get("message") or "").strip()
            return f"container {container.get('name')} exited with code {ended['exitCode']}" + (said and f": {said}")
    return ""


def disrupted_by(*reasons: str) -> Sign:
    return lambda pod: disruption(pod).get("reason") in reasons


def is_disrupted(pod: WorkerPod) -> bool:
    return bool(disruption(pod))


def kubelet_says(*reasons: str) -> Sign:
    """The reason of the pod, not of a container."""
    return lambda pod: status_reason(pod) in reasons


def terminated_as(*reasons: str) -> Sign:
    return lambda pod: pod.termination.get("reason") in reasons


def waits_as(*reasons: str) -> Sign:
    return lambda pod: pod.waiting()[0] in reasons


def exited_with(*codes: int) -> Sign:
    return lambda pod: pod.exit_code in codes


def mentions(text: re.Pattern[str]) -> Sign:
    """In what the pod says, the container that waits, or the one that ended."""

    def found(pod: WorkerPod) -> bool:
        return any(_is_in(_ends(said), text) for said in (status_message(pod), pod.waiting()[1], last_words(pod)))

    return found


# The workers of a gang often fail with the same words.
@lru_cache(maxsize=256)
def _is_in(said: str, text: re.Pattern[str]) -> bool:
    return text.search(said) is not None


def _ends(said: str) -> str:
    """The beginning and the end of a long text. The search takes time, and the operator has thousands of pods."""
    return said if len(said) <= 2 * _SEARCHED else f"{said[:_SEARCHED]}\n{said[-_SEARCHED:]}"


def both(one: Sign, other: Sign) -> Sign:
    return lambda pod: one(pod) and other(pod)


def deleted_first(pod: WorkerPod) -> bool:
    """Its deletion was asked for before it had ended."""
    asked, ended = deletion_asked(pod), ended_at(pod)
    if asked is None:
        return False
    if was_stopped(pod):
        return True
    return ended > asked if ended else pod.phase != "Failed"


def ended_by_kubelet(pod: WorkerPod) -> bool:
    """Refused, or stopped by the node's own decision: where a container simply ends, the kubelet gives no reason."""
    return bool(status_reason(pod))


def never_ran(pod: WorkerPod) -> bool:
    """The pod failed, and the worker's container did not."""
    return pod.phase == "Failed" and not pod.exit_code
