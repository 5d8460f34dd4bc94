"""Where the job's time went, second by second.

Every moment belongs to one activity, so that the sums add up to the job's life. The boundaries that the operator does
not write a status for, a pod's creation and its placement, are read from the pods afterwards.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from tpu_training_operator.api.status import Activity, Goodput
from tpu_training_operator.domain.observed import WorkerPod, format_time, parse_time


def born(created: str) -> Goodput:
    """A job that waits for its first nodes since it was created."""
    return Goodput(activity=Activity.QUEUE, since=format_time(parse_time(created)))


def charge(goodput: Goodput, until: datetime, then: Activity) -> Goodput:
    """The time up to `until` goes to the present activity, what follows to `then`. Nothing is taken back where
    `until` lies before what is accounted for already."""
    until = until.replace(microsecond=0)
    seconds = int((until - parse_time(goodput.since)).total_seconds())
    if seconds <= 0 or goodput.activity is Activity.FINISHED:
        return replace(goodput, activity=then)

    def spent(activity: Activity, before: int) -> int:
        return before + seconds if goodput.activity is activity else before

    return _with_ratio(
        replace(
            goodput,
            queue_seconds=spent(Activity.QUEUE, goodput.queue_seconds),
            start_seconds=spent(Activity.START, goodput.start_seconds),
            productive_seconds=spent(Activity.TRAIN, goodput.productive_seconds),
            unsaved_seconds=spent(Activity.TRAIN, goodput.unsaved_seconds),
            recovery_seconds=spent(Activity.RECOVERY, goodput.recovery_seconds),
            suspended_seconds=spent(Activity.SUSPENDED, goodput.suspended_seconds),
            activity=then,
            since=format_time(until),
        )
    )


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
    return replace(goodput, unsaved_seconds=int(goodput.unsaved_seconds * min(but, 1.0)))


def lost(goodput: Goodput) -> Goodput:
    """What was trained since the last checkpoint was for nothing."""
    return _with_ratio(
        replace(
            goodput,
            productive_seconds=goodput.productive_seconds - goodput.unsaved_seconds,
            wasted_seconds=goodput.wasted_seconds + goodput.unsaved_seconds,
            unsaved_seconds=0,
        )
    )


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
    return replace(goodput, ratio=f"{goodput.productive_seconds / life:.3f}" if life else None)
