"""What a pod's events say about why it does not start.

Only they tell of a volume that cannot be mounted, and of what the cluster autoscaler makes of a pod without a node.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST_LINE = 200
_AUTOSCALER = ("NotTriggerScaleUp", "TriggeredScaleUp", "FailedScaleUp")
# The pod's own condition says it, in the scheduler's words.
_KNOWN_ANYWAY = ("FailedScheduling",)


def line_of(events: Sequence[Mapping[str, Any]]) -> str:
    """The newest event that tells why a pod waits; empty where none does."""
    telling = [event for event in events if _tells(event)]
    if not telling:
        return ""
    newest = max(telling, key=_time)
    line = " ".join(f"{newest.get('reason')}: {newest.get('note') or ''}".split()).removesuffix(":")
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."


def slim_event(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """The event with what is read here, if it tells why a pod waits. Whoever may create events chooses their length."""
    if not _tells(event):
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


def _tells(event: Mapping[str, Any]) -> bool:
    reason = event.get("reason")
    return reason in _AUTOSCALER or (event.get("type") == "Warning" and reason not in _KNOWN_ANYWAY)


def _time(event: Mapping[str, Any]) -> str:
    """RFC 3339 in UTC, of whole seconds or finer: the first 19 characters compare as times do."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max(str(time or "")[:19] for time in (*times, event["metadata"].get("creationTimestamp")))
