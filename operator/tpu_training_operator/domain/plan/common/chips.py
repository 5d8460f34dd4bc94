"""Which chips a job holds, and for how long: a worker holds those of its host from the moment it gets its node until it
has stopped.

A pod shows both times as long as it exists. For pods that are gone, the status remembers how many chips were held when
it was last written. They count up to the pass that finds the pods gone, which records that (`budget`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.observed import Observed
from tpu_training_operator.domain.failures.pod_signs import ended_by


@dataclass(frozen=True)
class Span:
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
    spans: tuple[Span, ...]

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
        Span(
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
