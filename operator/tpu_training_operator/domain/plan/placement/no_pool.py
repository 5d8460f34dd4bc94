"""Whether a cluster has no node pool for a slice, so that waiting cannot help.

Two components must say so about the same worker. The scheduler: no node matches the worker's selectors, not even one
that is busy or not ready. The cluster autoscaler: none of its node pools matches either, with or without nodes. A pool
that cannot grow right now (at its limit, or in backoff) counts as a pool.

The autoscaler does not mention pools that it has yet to create. Where it creates them (Autopilot, node
auto-provisioning, compute classes), its silence proves nothing. So the operator reads these events only if it is told
that nothing creates node pools.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_training_operator.domain.plan.common.context import Context

# No TPU node has this taint.
_OTHERS = r"node\(s\) (?:didn't match (?:Pod's node affinity/selector|Pod's node affinity|node selector)"
_REASON = rf"(\d+) {_OTHERS}|had untolerated taint \{{nvidia\.com/gpu: [^{{}},]*\}})"
_REASONS = rf"{_REASON}(?:, {_REASON})*"
# After its full stop comes what taking nodes from others would help, in the words of each plugin that was asked.
_SCHEDULER = re.compile(rf"(?P<said>0/(?P<nodes>\d+) nodes are available: (?P<reasons>{_REASONS})\.)( .*)?")
_AUTOSCALER = re.compile(rf"pod didn't trigger scale-up(?: \([^():]*\))?: {_REASONS}")
_TRIES = ("TriggeredScaleUp", "FailedScaleUp")
_LONGEST_NOTE = 400


def autoscaler_has_none(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the autoscaler's events of a pod say that none of its node pools could ever have the pod."""
    notes = [str(event.get("note") or "") for event in events if event.get("reason") == "NotTriggerScaleUp"]
    has_tried = any(event.get("reason") in _TRIES for event in events)
    # A long note may have been cut, and its rest may have said anything.
    return bool(notes) and not has_tried and all(map(_rules_out, notes))


def _rules_out(note: str) -> bool:
    return len(note) < _LONGEST_NOTE and _AUTOSCALER.fullmatch(note.strip()) is not None


def scheduler_has_none(message: str) -> str | None:
    """The scheduler's words if every node of the cluster lacks what the pod selects; else None."""
    found = _SCHEDULER.fullmatch(message.strip())
    if found is None:
        return None
    lacking = sum(int(number) for number in re.findall(r"(\d+) node\(s\)", found["reasons"]))
    return found["said"] if lacking == int(found["nodes"]) else None


def no_pool(ctx: Context) -> str | None:
    """Why no worker of the gang can ever have a node here; None if one may."""
    notes = ctx.observed.notes
    known = notes.events.without_pool if notes and notes.events else frozenset[str]()
    if not known or any(pod.node is not None for pod in ctx.pods):
        return None
    said = (str(pod.condition("PodScheduled").get("message") or "") for pod in ctx.pods if pod.name in known)
    told = next(filter(None, map(scheduler_has_none, said)), None)
    return None if told is None else f"the cluster has no node pool for {ctx.option}: {told}"
