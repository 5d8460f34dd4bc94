"""Where the job's time went, second by second.

Every moment belongs to one activity, so that the sums add up to the job's life. The boundaries that the operator does
not write a status for, a pod's creation and its placement, are read from the pods afterwards.
"""

from collections.abc import Sequence
from datetime import datetime

from tpu_training_operator.api.status import Activity, Goodput
from tpu_training_operator.domain.observed import WorkerPod, format_time, parse_time

_SUMS = {
    Activity.QUEUE: "queue_seconds",
    Activity.START: "start_seconds",
    Activity.TRAIN: "productive_seconds",
    Activity.RECOVERY: "recovery_seconds",
    Activity.SUSPENDED: "suspended_seconds",
}


def born(created: str) -> Goodput:
    """A job that waits for its first nodes since it was created."""
    return Goodput(activity=Activity.QUEUE, since=format_time(parse_time(created)))


def charge(goodput: Goodput, until: datetime, then: Activity) -> Goodput:
    """The time up to `until` goes to the present activity, what follows to `then`. Nothing is taken back where
    `until` lies before what is accounted for already."""
    until = until.replace(microsecond=0)
    seconds = int((until - parse_time(goodput.since)).total_seconds())
    if seconds <= 0 or goodput.activity is Activity.FINISHED:
        return goodput.model_copy(update={"activity": then})
    name = _SUMS[goodput.activity]
    update = {name: getattr(goodput, name) + seconds, "activity": then, "since": format_time(until)}
    if goodput.activity is Activity.TRAIN:
        update["unsaved_seconds"] = goodput.unsaved_seconds + seconds
    return _with_ratio(goodput.model_copy(update=update))


def settle(goodput: Goodput, pods: Sequence[WorkerPod], until: datetime) -> Goodput:
    """Up to `until`, as the pods of the attempt tell it: from their creation until the last one has its node the gang
    waits in the queue, whatever it does before and after."""
    activity = goodput.activity
    if activity in (Activity.QUEUE, Activity.RECOVERY) and pods:
        goodput = charge(goodput, min(until, max(pod.created for pod in pods)), Activity.QUEUE)
        placed = [pod.placed for pod in pods if pod.placed is not None]
        if len(placed) == len(pods):
            after = Activity.START if activity is Activity.QUEUE else activity
            goodput = charge(goodput, min(until, max(placed)), after)
            return charge(goodput, until, after)
        return charge(goodput, until, activity)
    return charge(goodput, until, activity)


def saved(goodput: Goodput, but: float = 0.0) -> Goodput:
    """What was trained up to now is in a checkpoint, but for this share of what was in none before."""
    return goodput.model_copy(update={"unsaved_seconds": int(goodput.unsaved_seconds * min(but, 1.0))})


def lost(goodput: Goodput) -> Goodput:
    """What was trained since the last checkpoint was for nothing."""
    update = {
        "productive_seconds": goodput.productive_seconds - goodput.unsaved_seconds,
        "wasted_seconds": goodput.wasted_seconds + goodput.unsaved_seconds,
        "unsaved_seconds": 0,
    }
    return _with_ratio(goodput.model_copy(update=update))


def active_seconds(goodput: Goodput) -> int:
    """The job's life without its waits for nodes and its suspensions."""
    return _life(goodput) - goodput.queue_seconds


def _life(goodput: Goodput) -> int:
    return (
        goodput.queue_seconds
        + goodput.start_seconds
        + goodput.productive_seconds
        + goodput.wasted_seconds
        + goodput.recovery_seconds
    )


def _with_ratio(goodput: Goodput) -> Goodput:
    life = _life(goodput)
    return goodput.model_copy(update={"ratio": f"{goodput.productive_seconds / life:.3f}" if life else None})
