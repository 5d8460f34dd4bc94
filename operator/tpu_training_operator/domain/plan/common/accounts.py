"""What a job spends: its time in seconds and its chips in chip-seconds, by activity, and its chips also by slice.

Every moment belongs to one activity, so the seconds add up to the job's life. The operator writes no status when a pod
is created or placed; these two boundaries are read from the pods afterwards.

A worker holds the chips of its host from the moment it gets its node until it has stopped. A pod shows both times as
long as it exists. For pods that are gone, the status remembers how many chips were held when it was last written. They
count up to the pass that finds the pods gone, which records that (`budget`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TypeVar

from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Accounts, Activity, ChipSeconds, Goodput, Status
from tpu_training_operator.domain.cluster_state.observed import Observed, WorkerPod, format_time, parse_time
from tpu_training_operator.domain.failures.pod_signs import ended_by

PLACEHOLDERS = "placeholders"
"""The key in `chipSeconds` for what placeholders held, on any slice."""
_ACCOUNTS = {
    Activity.QUEUE: "queue",
    Activity.START: "start",
    Activity.TRAIN: "productive",
    Activity.RECOVERY: "recovery",
    Activity.MOVING: "moving",
}
_A = TypeVar("_A", bound=Accounts)


@dataclass(frozen=True)
class HostSpan:
    """The chips of one host, from when its pod got the node until the pod ended; `end`: None if it has not."""

    chips: int
    start: datetime
    end: datetime | None
    is_placeholder: bool = False

    def holds(self, moment: datetime) -> bool:
        return self.start <= moment and (self.end is None or moment < self.end)

    def between(self, start: datetime, end: datetime) -> int:
        part = min(self.end or end, end) - max(self.start, start)
        return self.chips * max(0, int(part.total_seconds()))


@dataclass(frozen=True)
class Holding:
    """Chips as the pods show them at `now`, in whole seconds. `gang`: the chips of all hosts of the present slice."""

    now: datetime
    gang: int
    spans: tuple[HostSpan, ...]

    @cached_property
    def held(self) -> int:
        return self.at(self.now)

    def at(self, moment: datetime) -> int:
        return sum(span.chips for span in self.spans if span.holds(moment))

    def between(self, start: datetime, end: datetime, *, placeholders: bool) -> int:
        """Returns the chip-seconds of workers, or of placeholders, in this period."""
        return sum(span.between(start, end) for span in self.spans if span.is_placeholder is placeholders)


def read_holding(
    observed: Observed, status: Status, now: datetime, per_host: Mapping[int, int] | None = None
) -> Holding:
    """Reads from the pods which chips they hold. `per_host`: chips per host, by the number of the option; by default as
    on the present slice."""
    now, resolved = now.replace(microsecond=0), status.resolved
    if resolved is None:
        return Holding(now, 0, ())
    pods = (*((pod, False) for pod in observed.pods), *((pod, True) for pod in observed.placeholders))
    spans = (
        HostSpan(
            (per_host or {}).get(pod.option_number, resolved.chips_per_host),
            pod.placed.replace(microsecond=0),
            end and end.replace(microsecond=0),
            is_placeholder,
        )
        for pod, is_placeholder in pods
        for end in (ended_by(pod) if pod.has_ended else None,)
        # A pod that ended at an unknown time never ran, or counts as gone.
        if pod.placed is not None and (end is not None or not pod.has_ended)
    )
    return Holding(now, resolved.chips, tuple(spans))


def account_of(activity: Activity, accounts: Accounts) -> str:
    return _ACCOUNTS.get(activity, accounts.AT_REST)


def _add(accounts: _A, **amounts: int) -> _A:
    return replace(accounts, **{name: getattr(accounts, name) + amount for name, amount in amounts.items()})


def spend(accounts: _A, activity: Activity, amount: int) -> _A:
    unsaved = amount if activity is Activity.TRAIN else 0
    return _add(accounts, **{account_of(activity, accounts): amount}, unsaved=unsaved)


def _save(accounts: _A, unsaved_share: float) -> _A:
    return _add(accounts, unsaved=int(accounts.unsaved * unsaved_share) - accounts.unsaved)


def _lose(accounts: _A) -> _A:
    return _add(accounts, productive=-accounts.unsaved, wasted=accounts.unsaved, unsaved=-accounts.unsaved)


def start_goodput(created: str) -> Goodput:
    """Returns the goodput of a new job: it has waited for nodes since it was created."""
    return Goodput(activity=Activity.QUEUE, since=format_time(parse_time(created)))


def charge(goodput: Goodput, until: datetime, then: Activity, seen: Holding | None = None) -> Goodput:
    """Adds the time up to `until` to the current activity; `then` is the activity from there on. Time that is already
    accounted for stays so, even if `until` lies before its end. `seen`: the chips that the pods hold."""
    until = until.replace(microsecond=0)
    goodput = replace(goodput, chip_seconds=charge_chips(goodput, until, seen))
    seconds = int((until - parse_time(goodput.since)).total_seconds())
    if seconds <= 0 or goodput.activity is Activity.FINISHED:
        return replace(goodput, activity=then)
    return _update_ratio(replace(spend(goodput, goodput.activity, seconds), activity=then, since=format_time(until)))


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
    share, spent = min(unsaved_share, 1.0), goodput.chip_seconds
    return replace(_save(goodput, share), chip_seconds=spent and _save(spent, share))


def mark_lost(goodput: Goodput) -> Goodput:
    """Counts the training since the last checkpoint as wasted, after a failure."""
    spent = goodput.chip_seconds
    return _update_ratio(replace(_lose(goodput), chip_seconds=spent and _lose(spent)))


def active_seconds(goodput: Goodput) -> int:
    """Returns the length of the job's life without its waits for nodes and its suspensions."""
    return goodput.total - goodput.suspended - goodput.queue


def _update_ratio(goodput: Goodput) -> Goodput:
    life = goodput.total - goodput.suspended
    return replace(goodput, ratio=f"{goodput.productive / life:.3f}" if life else None)


def charge_chips(goodput: Goodput, until: datetime, seen: Holding | None) -> ChipSeconds | None:
    """Charges the chips up to `until` to the present activity. None if the gang's size is unknown. `seen`: None if the
    pods have not been read; then the chips that were held last count."""
    spent = goodput.chip_seconds
    if spent is None:
        if seen is None or not seen.gang:
            return None
        spent = _estimate(goodput, seen.gang)
    since = parse_time(spent.since)
    if until < since:
        return spent
    seconds = int((until - since).total_seconds())
    if seen is None:
        used, idle, held = spent.held * seconds, 0, spent.held
    else:
        gone = count_vanished(spent, seen)
        used = seen.between(since, until, placeholders=False) + gone * seconds
        idle = seen.between(since, until, placeholders=True)
        held = seen.at(until) + (gone if until < seen.now else 0)
    spent = _add(spend(spent, goodput.activity, used), placeholders=idle)
    return replace(spent, held=held, since=format_time(until))


def count_vanished(spent: ChipSeconds, seen: Holding) -> int:
    """Returns the chips that pods held when the sums were last updated, and that are gone with their pods."""
    return max(0, spent.held - seen.at(parse_time(spent.since)))


def _estimate(goodput: Goodput, chips: int) -> ChipSeconds:
    """Counts for a job that began before its chips were counted, as if every attempt had held all of them from its
    start."""
    names = ("start", "productive", "wasted", "recovery", "moving", "unsaved")
    return _add(ChipSeconds(since=goodput.since), **{name: getattr(goodput, name) * chips for name in names})


def charge_slice(after: Status, before: Status, name: str) -> Status:
    """Returns the status with the chips used since `before` charged to the slice of that name."""
    placement = after.placement
    if placement is None:
        return after
    used = _count_by_slice(after, name)
    used.subtract(_count_by_slice(before, name))
    spent = {key: placement.chip_seconds.get(key, 0) + seconds for key, seconds in used.items() if seconds > 0}
    return replace(after, placement=replace(placement, chip_seconds={**placement.chip_seconds, **spent}))


def _count_by_slice(status: Status, name: str) -> Counter[str]:
    spent = status.goodput.chip_seconds if status.goodput else None
    idle = spent.placeholders if spent else 0
    return Counter({name: spent.total - idle if spent else 0, PLACEHOLDERS: idle})
