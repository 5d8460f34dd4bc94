"""A job and its pods as the planner reads them: built from raw objects, never written back."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.cluster_state.ownership import controller, is_ours, job_of
from tpu_training_operator.domain.cluster_state.worker_reports import EMPTY_INBOX, Inbox, Notes, WorkerReport
from tpu_training_operator.domain.cluster_state.workload import Queue
from tpu_training_operator.domain.job.naming import WorkerId, entry_check_pod_name, is_placeholder
from tpu_training_operator.domain.job.topology import SliceLayout
from tpu_training_operator.domain.job.trainer_report import LastWords, read_last_words

Object = Mapping[str, Any]

_KUEUE_GATE = {"name": constants.KUEUE_POD_GATE}


@dataclass(frozen=True)
class WorkerPod:
    """The pod of one worker. `raw`: the pod as the API server returned it. Properties that a pass reads many times are
    cached."""

    raw: Object

    @cached_property
    def named_worker(self) -> WorkerId | None:
        """The worker that the pod's name stands for; None if it is not the name of any job's worker."""
        return WorkerId.of_pod(self.name)

    @property
    def worker(self) -> WorkerId:
        worker = self.named_worker
        assert worker is not None, f"{self.name} is not the name of a worker"
        return worker

    @cached_property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.raw["metadata"]["uid"])

    @property
    def option_number(self) -> int:
        """The number of the job's option that the pod was created for, from its label."""
        label = (self.raw["metadata"].get("labels") or {}).get(constants.LABEL_ALTERNATIVE, "0")
        return int(label) if label.isascii() and label.isdigit() and len(label) < 4 else 0

    @cached_property
    def node(self) -> str | None:
        node = self.raw.get("spec", {}).get("nodeName")
        return None if node is None else str(node)

    @property
    def addresses(self) -> list[str]:
        return [str(entry.get("ip")) for entry in self.raw.get("status", {}).get("podIPs") or ()]

    @cached_property
    def phase(self) -> str:
        return str(self.raw.get("status", {}).get("phase", "Pending"))

    @property
    def is_terminating(self) -> bool:
        return "deletionTimestamp" in self.raw["metadata"]

    @cached_property
    def created(self) -> datetime:
        return parse_time(self.raw["metadata"]["creationTimestamp"])

    @cached_property
    def placed(self) -> datetime | None:
        """When the pod was assigned to a node; None before that."""
        scheduled = self.condition("PodScheduled")
        at = scheduled.get("lastTransitionTime") if scheduled.get("status") == "True" else None
        return parse_time(at) if at else (self.created if self.node else None)

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_about_to_end(self) -> bool:
        """Whether all its containers have ended; the kubelet then marks the pod, usually a second later."""
        states = [container.get("state") or {} for container in self.containers]
        return not self.has_ended and bool(states) and all("terminated" in state for state in states)

    @property
    def is_released(self) -> bool:
        """Whether it is deleted, and its node has released it or never had it. Only a finalizer keeps the object, so
        deleting it again changes nothing."""
        return self.is_terminating and self.raw["metadata"].get("deletionGracePeriodSeconds") == 0

    @property
    def may_use_chips(self) -> bool:
        """Whether it may still use chips. It cannot once it has ended, if only a finalizer keeps it, or if it was
        deleted before it had a node, because then it never gets one."""
        return not self.has_ended and not self.is_released and not (self.is_terminating and self.node is None)

    @property
    def is_ready(self) -> bool:
        return self.condition("Ready").get("status") == "True" and not self.is_terminating

    def condition(self, kind: str) -> Object:
        return self._conditions.get(kind, {})

    @cached_property
    def _conditions(self) -> Mapping[str, Object]:
        listed: Sequence[Object] = self.raw.get("status", {}).get("conditions") or ()
        return {condition["type"]: condition for condition in reversed(listed)}

    @property
    def init_containers(self) -> Sequence[Object]:
        return self.raw.get("status", {}).get("initContainerStatuses") or ()

    @property
    def containers(self) -> Sequence[Object]:
        """The statuses of the worker's container and of sidecars."""
        return self.raw.get("status", {}).get("containerStatuses") or ()

    @cached_property
    def container(self) -> Object:
        """The status of the worker's container; empty before the kubelet writes one."""
        return next((status for status in self.containers if status.get("name") == constants.CONTAINER_NAME), {})

    @property
    def was_taken_by_kueue(self) -> bool:
        """Whether Kueue's pod integration holds back this pod by itself, not its gang as a whole. A pod in a pod group
        does not count, because its owner wants Kueue to hold it."""
        gates: Sequence[Object] = self.raw.get("spec", {}).get("schedulingGates") or ()
        labels = self.raw["metadata"].get("labels") or {}
        return constants.LABEL_POD_GROUP not in labels and _KUEUE_GATE in map(dict, gates)

    def waiting(self, *, sidecars: bool = False) -> tuple[str, str]:
        """Returns reason and message of the first container that waits to start; ("", "") if none does. An init
        container that a webhook added comes before the worker's. `sidecars`: include these; no worker waits for
        them."""
        for container in (*self.init_containers, self.container, *(self.containers if sidecars else ())):
            if state := (container.get("state") or {}).get("waiting"):
                return str(state.get("reason") or ""), str(state.get("message") or "")
        return "", ""

    @cached_property
    def termination(self) -> Object:
        """`state.terminated` of the worker's container (exitCode, reason, message, finishedAt); empty before its
        end."""
        terminated: Object = self.container.get("state", {}).get("terminated") or {}
        return terminated

    @cached_property
    def trainer_message(self) -> LastWords | None:
        """The trainer's termination message; None if it is anything but a JSON object."""
        return read_last_words(str(self.termination.get("message") or ""))

    @cached_property
    def last_words(self) -> str:
        """The message within the trainer's JSON, or the entire termination message if that is plain text."""
        if self.trainer_message is None:
            return plain(str(self.termination.get("message") or "").strip())
        return self.trainer_message.message

    @cached_property
    def runs_trainer(self) -> bool:
        """Whether it runs the trainer rather than a loop of the user's own."""
        containers: Sequence[Object] = self.raw.get("spec", {}).get("containers") or ()
        ours = (container for container in containers if container["name"] == constants.CONTAINER_NAME)
        commands = (constants.TRAINER_COMMAND, constants.FAST_SLICE_CHECK_COMMAND, constants.CHECK_COMMAND)
        return any(container.get("command") in commands for container in ours)

    @property
    def exit_code(self) -> int | None:
        return self.termination.get("exitCode")


@dataclass(frozen=True)
class EntryCheckPod(WorkerPod):
    """The pod that tries the job on a CPU. Its failures count as those of a worker of attempt 0."""

    @property
    def worker(self) -> WorkerId:
        return WorkerId(0, 0, 0)


@dataclass(frozen=True)
class Observed:
    """A job, the pods of its workers, the reports it sent, the operator's notes on it, and its place in a queue.

    `entry_check_pod`: the pod that tries the job before any worker is created, if there is one. `placeholders`: pods
    that hold nodes of a better slice. `notes`: None if the plan is only shown, not carried out. `queue`: None for a job
    without Kueue. `trace`: the pod of a missing worker as it is now or was last seen; it is looked up only before its
    loss is recorded as a failure. `is_namespace_going`: likewise looked up only where it matters.
    """

    job: Object
    pods: tuple[WorkerPod, ...]
    inbox: Inbox = EMPTY_INBOX
    notes: Notes | None = None
    queue: Queue | None = None
    entry_check_pod: EntryCheckPod | None = None
    placeholders: tuple[WorkerPod, ...] = ()
    trace: WorkerPod | None = None
    is_namespace_going: bool = False

    @staticmethod
    def of(job: Object, pods: Sequence[Object], inbox: Inbox = EMPTY_INBOX) -> "Observed":
        name = job["metadata"]["name"]
        ours = [WorkerPod(pod) for pod in pods if is_ours(pod, job)]
        workers = (pod for pod in ours if pod.named_worker and pod.name == pod.named_worker.pod_name(name))
        checks = (EntryCheckPod(pod.raw) for pod in ours if pod.name == entry_check_pod_name(name))
        placeholders = tuple(pod for pod in ours if is_placeholder(pod.name, name))
        return Observed(job, tuple(workers), inbox, entry_check_pod=next(checks, None), placeholders=placeholders)

    @property
    def every_pod(self) -> tuple[WorkerPod, ...]:
        checks = (self.entry_check_pod,) if self.entry_check_pod else ()
        return (*self.pods, *checks, *self.placeholders)

    @property
    def generation(self) -> int:
        return int(self.job["metadata"].get("generation", 1))

    def within(self, layouts: Sequence[SliceLayout]) -> "Observed":
        """Returns the job without the pods whose slice or host index exists in none of these layouts."""
        places = ((pod, (pod.worker.slice, pod.worker.host)) for pod in self.pods)
        return replace(self, pods=tuple(pod for pod, place in places if any(layout.has(*place) for layout in layouts)))

    @property
    def report(self) -> WorkerReport | None:
        """The latest report, if its pod still exists: it may come from an older job of the same name. The last report
        of a gang that was stopped counts although its pod is gone."""
        report = self.inbox.report
        if report is None or any(pod.uid == report.pod_uid for pod in self.pods):
            return report
        return report if self._is_stopped and report.attempt == self.job["status"].get("attempt") else None

    @property
    def _is_stopped(self) -> bool:
        conditions: Sequence[Object] = (self.job.get("status") or {}).get("conditions") or ()
        stopped = (("Suspended", "True"), ("Admitted", "False"))
        return any((condition["type"], condition["status"]) in stopped for condition in conditions)

    def of_attempt(self, attempt: int) -> list[WorkerPod]:
        return sorted((p for p in self.pods if p.worker.attempt == attempt), key=lambda pod: pod.worker)

    def before_attempt(self, attempt: int) -> list[WorkerPod]:
        return sorted((p for p in self.pods if p.worker.attempt < attempt), key=lambda pod: pod.worker)


# The fields that the planner or its messages use. A pod has twice as much in its managedFields alone, and the largest
# gang has five thousand pods. No field may have a length that users choose: owner references, finalizers, command and
# environment can fill a pod.
_METADATA = ("name", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
_SPEC = ("nodeName", "terminationGracePeriodSeconds")
_STATUS = (
    *("phase", "reason", "message", "startTime", "podIPs"),
    *("conditions", "initContainerStatuses", "containerStatuses"),
)
_LABELS = (constants.LABEL_JOB_NAME, *constants.WORKER_LABELS, constants.LABEL_ALTERNATIVE, constants.LABEL_POD_GROUP)
_OWNER = ("apiVersion", "kind", "name", "uid", "controller")
_TRAINER = {"name": constants.CONTAINER_NAME, "command": constants.TRAINER_COMMAND}
_CONTAINER_STATUS = ("name", "state", "lastState", "ready", "restartCount")
_CONDITIONS = ("PodScheduled", "Ready", "DisruptionTarget", "TerminationTarget")
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")


def slim(pod: Object) -> dict[str, Any]:
    """Returns the pod with only its version and the fields that can change a plan."""
    status = only(pod.get("status") or {}, _STATUS)
    if conditions := status.get("conditions"):
        status["conditions"] = [
            only(condition, _CONDITION) for condition in conditions if condition["type"] in _CONDITIONS
        ]
    for name in ("initContainerStatuses", "containerStatuses"):
        if containers := status.get(name):
            status[name] = [only(container, _CONTAINER_STATUS) for container in containers]
    metadata = only(pod["metadata"], _METADATA)
    owner = controller(pod)
    metadata["ownerReferences"] = [only(owner, _OWNER)] if owner else []
    metadata["labels"] = only(pod["metadata"].get("labels") or {}, _LABELS)
    spec = only(pod.get("spec") or {}, _SPEC)
    if WorkerPod(pod).runs_trainer:
        spec["containers"] = [_TRAINER]
    if WorkerPod(pod).was_taken_by_kueue:
        spec["schedulingGates"] = [_KUEUE_GATE]
    return {"metadata": metadata, "spec": spec, "status": status}


def slim_worker(pod: Object) -> dict[str, Any] | None:
    """Returns the slim pod if a job controls it; None for any other pod, whatever its labels."""
    return slim(pod) if job_of(pod) else None


def only(fields: Object, names: Sequence[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


# Well within the range of datetime: deadlines are added to a time, and grace periods subtracted.
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(2200, 1, 1, tzinfo=UTC)
_SECONDS = re.compile(r"(\d{4})(-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)")


def parse_time(text: str) -> datetime:
    """Parses a Kubernetes timestamp (RFC 3339) into UTC, between EARLIEST and LATEST.

    The API server accepts more than RFC 3339 as a `date-time`, and users can edit a status. A time without a zone is in
    UTC, and an unreadable fraction or zone is ignored. Raises ValueError for any other text.
    """
    moment = _read_time(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    # Clamp before the conversion, which fails at the ends of the calendar.
    return min(max(moment, EARLIEST), LATEST).astimezone(UTC)


def _read_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.upper())
    except ValueError:
        match = _SECONDS.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not a time such as 2026-01-31T09:30:00Z") from None
        year, date, time = match.groups()
        # Go has a year 0, Python does not.
        return datetime.fromisoformat(f"{max(int(year), 1):04}{date}T{time}+00:00")


def format_time(moment: datetime) -> str:
    """Formats a moment in UTC as Kubernetes does."""
    return moment.replace(microsecond=0, tzinfo=None).isoformat() + "Z"
