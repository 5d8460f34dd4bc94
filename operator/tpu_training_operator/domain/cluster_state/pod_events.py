"""Reads the events of a pod: why it waits, and whether the cluster has a node pool for it.

Waiting cannot help only if two components agree that the cluster has no node pool for a worker. The scheduler must say
that no node matches the worker's selectors, not even one that is busy or not ready. The cluster autoscaler must say
that none of its node pools matches either, with or without nodes. A pool that cannot grow right now (at its limit, or
in backoff) counts as a pool.

The autoscaler does not mention pools that it has yet to create. Where it creates them (Autopilot, node
auto-provisioning, compute classes), its silence proves nothing. So the operator draws this conclusion only if its
options say that nothing creates node pools.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST_LINE = 200
_AUTOSCALER = ("NotTriggerScaleUp", "TriggeredScaleUp", "FailedScaleUp")
# The pod's own condition repeats the scheduler's words.
_KNOWN_ANYWAY = ("FailedScheduling",)

# The taint of GPU nodes counts, too: no TPU node has it.
_OTHERS = r"node\(s\) (?:didn't match (?:Pod's node affinity/selector|Pod's node affinity|node selector)"
_REASON = rf"(\d+) {_OTHERS}|had untolerated taint \{{nvidia\.com/gpu: [^{{}},]*\}})"
_REASONS = rf"{_REASON}(?:, {_REASON})*"
# After the full stop, the scheduler's plugins say whether preemption would help.
_SCHEDULER_MESSAGE = re.compile(rf"(?P<sentence>0/(?P<nodes>\d+) nodes are available: (?P<reasons>{_REASONS})\.)( .*)?")
_AUTOSCALER_NOTE = re.compile(rf"pod didn't trigger scale-up(?: \([^():]*\))?: {_REASONS}")
_TRIES = ("TriggeredScaleUp", "FailedScaleUp")
_LONGEST_NOTE = 400


def autoscaler_has_no_pool(events: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether the autoscaler's events of a pod say that none of its node pools could ever take the pod."""
    notes = [str(event.get("note") or "") for event in events if event.get("reason") == "NotTriggerScaleUp"]
    has_tried = any(event.get("reason") in _TRIES for event in events)
    # A long note may have been cut, and nothing is known about its rest.
    return bool(notes) and not has_tried and all(map(_is_ruled_out, notes))


def _is_ruled_out(note: str) -> bool:
    return len(note) < _LONGEST_NOTE and _AUTOSCALER_NOTE.fullmatch(note.strip()) is not None


def explain_no_matching_node(message: str) -> str | None:
    """Returns the scheduler's sentence if every node of the cluster lacks what the pod selects; otherwise None."""
    match = _SCHEDULER_MESSAGE.fullmatch(message.strip())
    if match is None:
        return None
    lacking = sum(int(number) for number in re.findall(r"(\d+) node\(s\)", match["reasons"]))
    return match["sentence"] if lacking == int(match["nodes"]) else None


def explain_wait(events: Sequence[Mapping[str, Any]]) -> str:
    """Returns the newest of a pod's events that explains why the pod waits; empty if none does."""
    newest = max(filter(_explains, events), key=_time, default=None)
    if newest is None:
        return ""
    line = " ".join(f"{newest.get('reason')}: {newest.get('note') or ''}".split()).removesuffix(":")
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."


def slim_event(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the fields that `explain_wait` reads; None if the event does not explain why a pod waits. The texts are
    cut, because whoever may create events chooses their length."""
    if not _explains(event):
        return None
    series = event.get("series") or {}
    return {
        "type": str(event.get("type"))[:_LONGEST_LINE],
        "reason": str(event.get("reason"))[:_LONGEST_LINE],
        "note": " ".join(str(event.get("note") or "")[: 2 * _LONGEST_LINE].split()),
        "series": {"lastObservedTime": series.get("lastObservedTime")},
        "deprecatedLastTimestamp": event.get("deprecatedLastTimestamp"),
        "eventTime": event.get("eventTime"),
        "metadata": {"creationTimestamp": event["metadata"].get("creationTimestamp")},
    }


def _explains(event: Mapping[str, Any]) -> bool:
    reason = event.get("reason")
    return reason in _AUTOSCALER or (event.get("type") == "Warning" and reason not in _KNOWN_ANYWAY)


def _time(event: Mapping[str, Any]) -> str:
    """Returns the latest RFC 3339 time of the event, in UTC. Its first 19 characters sort like the times."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max(str(time or "")[:19] for time in (*times, event["metadata"].get("creationTimestamp")))
