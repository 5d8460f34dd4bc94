"""A plan: batches of actions, one status, events. It also says how it changes the course of its job, and which reads it
must rest on.

A watch may be late, and the watch of pods may be later than that of jobs. Most plans are safe nevertheless: deletions
name a uid, and no status is written over one that was not read. But pods that are not known yet look like pods that are
gone. So a plan that replaces, stops or creates workers, or publishes their addresses, needs the present state of the
gang. Without it,

- a gang that another operator process has just started would be taken for one that has lost its workers;
- workers would be created beside those of an earlier attempt;
- the workers' names would resolve to addresses that other pods may have by now;
- quota would be given back while workers that are not known yet still use the chips;
- a worker that has ended with its job, or has failed, would be deleted as if it still ran, and its log with it.

A plan that changes the course of its job by a status alone needs only the present pods: the status is not written
unless the job is still the one that was read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, IntEnum, auto

from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.objects.actions import Action, Event

LOOK_AGAIN = timedelta(seconds=15)
"""How soon to look again at what a watch usually reports sooner: a watch can be broken for a while. A shorter wait
would cost too much, because many gangs can wait at once."""


class Freshness(IntEnum):
    """The reads that a plan must rest on."""

    CACHED = 0
    """Whatever the caches hold."""
    FRESH_PODS = 1
    """Pods read from the API server."""
    FRESH_ALL = 2
    """The job read from the API server, and the pods read after it."""


class Turn(Enum):
    """How a plan changes the course of its job. The next pass does what follows from it."""

    NONE = auto()
    ATTEMPT = auto()
    """An attempt begins, or one that the status has lost is adopted."""
    SUSPEND = auto()
    """The gang stops, and may start again: because of its user, its budget or its queue."""
    END = auto()
    """The job succeeds or fails."""


@dataclass(frozen=True)
class Batch:
    """Actions that are carried out concurrently. `needs`: the reads that they must rest on."""

    actions: Sequence[Action]
    needs: Freshness = Freshness.CACHED


Batches = tuple[Batch, ...]


@dataclass(frozen=True)
class Plan:
    """The batches in order; then the status, if it changed; then the events.

    `again`: when to reconcile the job again even if the cluster reports no change; None: only after a change.
    """

    batches: Batches = ()
    status: Status | None = None
    events: tuple[Event, ...] = ()
    again: timedelta | None = None
    turn: Turn = Turn.NONE

    @property
    def freshness(self) -> Freshness:
        """The reads that the whole plan must rest on."""
        turning = Freshness.FRESH_ALL if self.batches else Freshness.FRESH_PODS
        needs = (turning if self.turn is not Turn.NONE else Freshness.CACHED, *(batch.needs for batch in self.batches))
        return max(needs)

    def due_within(self, *waits: timedelta | None) -> "Plan":
        """Returns the plan with the next pass after the shortest of these waits at the latest."""
        return replace(self, again=min((wait for wait in (self.again, *waits) if wait is not None), default=None))

    def then(self, *others: "Plan") -> "Plan":
        """Returns the plan with the batches, events and waits of the others after its own. At most one of them has a
        status."""
        plans = (self, *others)
        return replace(
            self,
            status=next((plan.status for plan in plans if plan.status is not None), None),
            batches=tuple(batch for plan in plans for batch in plan.batches),
            events=tuple(event for plan in plans for event in plan.events),
        ).due_within(*(plan.again for plan in others))
