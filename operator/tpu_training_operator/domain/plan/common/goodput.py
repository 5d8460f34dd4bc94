"""Where a job's time went, second by second.

Every moment belongs to one activity, so the sums add up to the job's life. The operator writes no status when a pod is
created or placed; these two boundaries are read from the pods afterwards. Chip-seconds are counted beside it (`chips`),
by the same activities.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from tpu_training_operator.api.status import Activity, Goodput
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, format_time, parse_time
from tpu_training_operator.domain.plan.common import chips
from tpu_training_operator.domain.plan.common.chips import Holding


def start_goodput(created: str) -> Goodput:
    """Returns the goodput of a new job: it has waited for nodes since it was created."""
    return Goodput(activity=Activity.QUEUE, since=format_time(parse_time(created)))


def charge(goodput: Goodput, until: datetime, then: Activity, seen: Holding | None = None) -> Goodput:
    """Adds the time up to `until` to the current activity; `then` is the activity from there on. Time that is already
    accounted for stays so, even if `until` lies before its end. `seen`: the chips that the pods hold."""
    until = until.replace(microsecond=0)
    goodput = replace(goodput, chip_seconds=chips.spend(goodput, until, seen))
    seconds = int((until - parse_time(goodput.since)).total_seconds())
    if seconds <= 0 or goodput.activity is Activity.FINISHED:
        return replace(goodput, activity=then)

    def spent(activity: Activity, before: int) -> int:
        return before + seconds if goodput.activity is activity else before

    return _update_ratio(
        replace(
            goodput,
            queue_seconds=spent(Activity.QUEUE, goodput.queue_seconds),
            start_seconds=spent(Activity.START, goodput.start_seconds),
            productive_seconds=spent(Activity.TRAIN, goodput.productive_seconds),
            unsaved_seconds=spent(Activity.TRAIN, goodput.unsaved_seconds),
            recovery_seconds=spent(Activity.RECOVERY, goodput.recovery_seconds),
            moving_seconds=spent(Activity.MOVING, goodput.moving_seconds),
            suspended_seconds=spent(Activity.SUSPENDED, goodput.suspended_seconds),
            activity=then,
            since=format_time(until),
        )
    )


def settle(goodput: Goodput, pods: Sequence[WorkerPod], until: datetime, seen: Holding | None = None) -> Goodput:
    """Returns the goodput up to `until`. From the creation of the attempt's pods until the last of them has its node,
    the gang waits in the queue, whatever its activity before and after."""
    activity = goodput.activity
    if activity in (Activity.QUEUE, Activity.RECOVERY, Activity.MOVING) and pods:
        goodput = charge(goodput, min(until, max(pod.created for pod in pods)), Activity.QUEUE, seen)
        placed = [pod.placed for pod in pods if pod.placed is not None]
        if len(placed) == len(pods):
            activity = Activity.START if activity is Activity.QUEUE else activity
            goodput = charge(goodput, min(until, max(placed)), activity, seen)
    return charge(goodput, until, activity, seen)


def mark_saved(goodput: Goodput, unsaved_share: float = 0.0) -> Goodput:
    """Counts all training up to a checkpoint as saved, except the share `unsaved_share` of what was unsaved before."""
    unsaved_share = min(unsaved_share, 1.0)
    unsaved = int(goodput.unsaved_seconds * unsaved_share)
    return replace(goodput, unsaved_seconds=unsaved, chip_seconds=chips.mark_saved(goodput.chip_seconds, unsaved_share))


def mark_lost(goodput: Goodput) -> Goodput:
    """Counts the training since the last checkpoint as wasted, after a failure."""
    return _update_ratio(
        replace(
            goodput,
            productive_seconds=goodput.productive_seconds - goodput.unsaved_seconds,
            wasted_seconds=goodput.wasted_seconds + goodput.unsaved_seconds,
            unsaved_seconds=0,
            chip_seconds=chips.mark_lost(goodput.chip_seconds),
        )
    )


def active_seconds(goodput: Goodput) -> int:
    """Returns the length of the job's life without its waits for nodes and its suspensions."""
    return _unsuspended_seconds(goodput) - goodput.queue_seconds


def _unsuspended_seconds(goodput: Goodput) -> int:
    return (
        goodput.queue_seconds
        + goodput.start_seconds
        + goodput.productive_seconds
        + goodput.wasted_seconds
        + goodput.recovery_seconds
        + goodput.moving_seconds
    )


def _update_ratio(goodput: Goodput) -> Goodput:
    life = _unsuspended_seconds(goodput)
    return replace(goodput, ratio=f"{goodput.productive_seconds / life:.3f}" if life else None)
