"""Why a gang waits, said in its status: how many hosts are ready, and what the others lack.

A gang that starts changes with every pod event, and thousands of gangs may wait at once. So a new reason is told after
ten seconds at the earliest, other counts once a minute, and the same words again every five minutes, for the accounts.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from tpu_training_operator.api.conditions import ConditionType, Reason, find
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.actions import LookAtEvents, Plan
from tpu_training_operator.domain.hosts import Group, group_words, host_of, summary
from tpu_training_operator.domain.lifecycle.conditions import Kind, Picture
from tpu_training_operator.domain.lifecycle.context import Situation
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.notes import Notes
from tpu_training_operator.domain.observed import WorkerPod
from tpu_training_operator.domain.words import count

_NEW_REASON = timedelta(seconds=10)
_NEW_COUNTS = timedelta(minutes=1)
_AGAIN = timedelta(minutes=5)
_SHORT_WAIT = timedelta(minutes=15)
_MOST_GROUPS = 3
_LONGEST = 1000
# Two pods of a kind may differ; more say the same.
_MOST_ASKED = 2
_REASONS = re.compile(r"(?<!\d)\d{1,5} hosts?: ([^:;(]{0,200})")
# A kubelet goes to and fro between the two.
_SAME = {"ErrImagePull": "ImagePullBackOff"}


def tell_why(here: Situation, decided: Plan) -> Plan:
    """The plan for a gang of which not all workers are ready, with what it waits for."""
    notes = here.observed.notes
    if notes is None or decided.status is not None:
        return decided
    between = _between_looks(here)
    pods = _to_ask_about(here)
    if pods and _is_due(notes, here, between):
        return replace(decided, stages=(*decided.stages, (LookAtEvents(pods),)), again=timedelta(0))
    message = sentence(here)
    wait = _wait(notes, here, message)
    if wait <= timedelta(0):
        return replace(decided, status=_told(here, message), again=_sooner(decided.again, between))
    return replace(decided, again=_sooner(decided.again, min(wait, between)))


def sentence(here: Situation) -> str:
    """attempt 2: 3 of 4 hosts ready; 1 host: ErrImagePull: ..."""
    layout = here.resolution.layout
    hosts = (host for pod in here.pods if (host := host_of(pod.raw)) is not None)
    found = summary(hosts, here.attempt, layout.slices, layout.hosts_per_slice)
    lines = here.observed.notes.events.lines if here.observed.notes and here.observed.notes.events else {}
    parts = [f"attempt {here.attempt}: {found.ready + found.finished} of {count(found.total, 'host')} ready"]
    parts += [_with_event(group, here, lines) for group in found.others[:_MOST_GROUPS]]
    if left := sum(len(group.places) for group in found.others[_MOST_GROUPS:]):
        parts.append(f"{left} more for other reasons")
    text = "; ".join(parts)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _with_event(group: Group, here: Situation, lines: Mapping[str, str]) -> str:
    names = (WorkerId(here.attempt, *map(int, place.split("/"))).pod_name(here.job.name) for place in group.places)
    told = next((f" ({name}: {lines[name]})" for name in names if name in lines), "")
    return group_words(group) + told


def _to_ask_about(here: Situation) -> tuple[tuple[str, str], ...]:
    """Pods whose own status does not say why they wait, by name and uid: a few of those with a node, and one of those
    without, of which the cluster autoscaler may have something to say."""
    silent = [pod for pod in here.pods if pod.node and not pod.is_ready and not pod.has_ended and not _says_why(pod)]
    unplaced = [pod for pod in here.pods if pod.node is None]
    return tuple((pod.name, pod.uid) for pod in (*silent[:_MOST_ASKED], *unplaced[:1]))


def _says_why(pod: WorkerPod) -> bool:
    found = host_of(pod.raw)
    return found is not None and found.why is not None and ": " in found.why


def _is_due(notes: Notes, here: Situation, between: timedelta) -> bool:
    """Not in the first seconds, in which every gang waits."""
    youngest = max(pod.created for pod in here.pods)
    return here.now >= youngest + _NEW_REASON and (notes.events is None or here.now >= notes.events.asked + between)


def _between_looks(here: Situation) -> timedelta:
    """Whoever has waited for long is looked at less often: no pod event tells of an event."""
    latest = max(max(pod.created, pod.placed or pod.created) for pod in here.pods)
    return _NEW_COUNTS if here.now < latest + _SHORT_WAIT else _AGAIN


def _wait(notes: Notes, here: Situation, message: str) -> timedelta:
    """Until these words may be written."""
    ready = find(here.status.conditions, ConditionType.READY)
    before = ready.message if ready else ""
    is_new = _reasons(message) != _reasons(before)
    pause = _AGAIN if message == before else _NEW_REASON if is_new else _NEW_COUNTS
    since = notes.written or max(pod.created for pod in here.pods)
    return min(pause, since + pause - here.now)


def _reasons(message: str) -> set[str]:
    return {_SAME.get(reason, reason) for reason in _REASONS.findall(message)}


def _told(here: Situation, message: str) -> Status:
    """The state and its reason stay: a gang that is replaced is Restarting until it runs."""
    ready = find(here.status.conditions, ConditionType.READY)
    is_replaced = here.status.state is State.RESTARTING and ready is not None
    reason = Reason.REPLACING_WORKERS if is_replaced else Reason.WAITING_FOR_WORKERS
    state = State.RESTARTING if is_replaced else State.STARTING
    status = replace(here.status, goodput=here.goodput())
    return here.present(status, Picture(state, Kind.IN_PROGRESS, reason, message))


def _sooner(one: timedelta | None, other: timedelta) -> timedelta:
    return other if one is None else min(one, other)
