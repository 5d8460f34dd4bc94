"""Reads the events of a pod: why it waits."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpu_training_operator.api.text import one_line

_LONGEST_LINE = 200
_AUTOSCALER = ("NotTriggerScaleUp", "TriggeredScaleUp", "FailedScaleUp")
# The pod's own condition repeats the scheduler's words.
_KNOWN_ANYWAY = ("FailedScheduling",)


def explain_wait(events: Sequence[Mapping[str, Any]]) -> str:
    """Returns the newest of a pod's events that explains why the pod waits; empty if none does."""
    newest = max(filter(_explains, events), key=_time, default=None)
    if newest is None:
        return ""
    return one_line(f"{newest.get('reason')}: {newest.get('note') or ''}", _LONGEST_LINE).removesuffix(":")


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
