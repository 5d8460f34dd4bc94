"""Simulates the loss of slices, to show on a laptop how a job moves: `tpujob run --simulate-loss`."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpu_training_operator.api.constants import LABEL_ALTERNATIVE, LABEL_SLICE_INDEX
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.kube.cluster import Object

_FORM = re.compile(r"(?P<slice>[^:]+):(?P<begins>[0-9]{1,6})-(?P<ends>[0-9]{1,6})?")
_SEVERAL = re.compile(r"(?P<times>[1-9][0-9]{0,3}) x (?P<slice>.+)")


@dataclass(frozen=True)
class Outage:
    """A time without nodes, in seconds of the run; workers on lost slices are killed. `numbers`: the affected options,
    by their place in the order of preference; `left`: how many of their slices stay."""

    numbers: frozenset[int]
    left: int
    begins: float
    ends: float

    def takes(self, pod: Object) -> bool:
        labels = pod["metadata"].get("labels") or {}
        is_there = int(labels.get(LABEL_ALTERNATIVE, "0")) in self.numbers
        return is_there and int(labels.get(LABEL_SLICE_INDEX, "0")) >= self.left


class Outages:
    """All outages of a run. `clock`: returns seconds."""

    def __init__(self, outages: Sequence[Outage] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._outages = outages
        self._clock = clock
        self._started = clock()

    def has_nodes_for(self, pod: Object) -> bool:
        now = self._clock() - self._started
        return not any(outage.begins <= now < outage.ends and outage.takes(pod) for outage in self._outages)

    def beginnings(self) -> list[tuple[float, Outage]]:
        """Returns in how many seconds each outage begins."""
        return [(self._started + outage.begins - self._clock(), outage) for outage in self._outages]


def parse_outage(text: str, options: Sequence[SliceOption]) -> Outage:
    """Parses SLICE:FROM-TO, such as v5litepod-16:20-45 or 2 x v5litepod-16:20-; without TO, the loss is permanent.
    Raises ValueError."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form SLICE:FROM-TO, in seconds, such as v5litepod-16:20-45")
    begins, ends = float(match["begins"]), float(match["ends"] or "inf")
    if ends <= begins:
        raise ValueError(f"{text!r} ends before it begins")
    return Outage(*_lost_slices(match["slice"], options), begins, ends)


def _lost_slices(name: str, options: Sequence[SliceOption]) -> tuple[frozenset[int], int]:
    """Returns `Outage.numbers` and `left`. A job on several slices can lose some of them."""
    several = _SEVERAL.fullmatch(name)
    slice_name, lost = (several["slice"], int(several["times"])) if several else (name, 1)
    total = options[0].layout.slices
    if str(options[0]).rpartition(" x ")[2] == slice_name and lost <= total:
        return frozenset(option.number for option in options if option.is_own), total - lost
    numbers = frozenset(option.number for option in options if str(option) == name)
    if not numbers:
        known = ", ".join(str(option) for option in options)
        raise ValueError(f"the job does not run on {name!r}; its slices are {known}")
    return numbers, 0
