"""What the cluster holds, as the planner reads it. Built by the reconciler from raw objects, never written back."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.notes import Notes
from tpu_training_operator.domain.ownership import controller, is_ours, worker_of
from tpu_training_operator.domain.report import NOTHING_HEARD, Inbox, Report
from tpu_training_operator.domain.topology import SliceLayout

Object = Mapping[str, Any]


@dataclass(frozen=True)
class WorkerPod:
    """One worker's pod of the job; `raw` is the pod as the API server gave it."""

    raw: Object

    @cached_property
    def worker(self) -> WorkerId:
        worker = WorkerId.of_pod(self.name)
        assert worker is not None, f"{self.name} is no worker's name"
        return worker

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.raw["metadata"]["uid"])

    @property
    def node(self) -> str | None:
        node = self.raw.get("spec", {}).get("nodeName")
        return None if node is None else str(node)

    @property
    def phase(self) -> str:
        return str(self.raw.get("status", {}).get("phase", "Pending"))

    @property
    def is_terminating(self) -> bool:
        return "deletionTimestamp" in self.raw["metadata"]

    @property
    def created(self) -> datetime:
        return parse_time(self.raw["metadata"]["creationTimestamp"])

    @property
    def placed(self) -> datetime | None:
        """When the pod got its node; None before."""
        scheduled = self.condition("PodScheduled")
        at = scheduled.get("lastTransitionTime") if scheduled.get("status") == "True" else None
        return parse_time(at) if at else (self.created if self.node else None)

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_ready(self) -> bool:
        return self.condition("Ready").get("status") == "True" and not self.is_terminating

    def condition(self, kind: str) -> Object:
        conditions: Sequence[Object] = self.raw.get("status", {}).get("conditions") or ()
        return next((condition for condition in conditions if condition["type"] == kind), {})

    @cached_property
    def termination(self) -> Object:
        """`state.terminated` of the trainer container (exitCode, reason, message, finishedAt); empty before."""
        statuses: Sequence[Object] = self.raw.get("status", {}).get("containerStatuses") or ()
        for status in statuses:
            if status["name"] == constants.CONTAINER_NAME:
                terminated: Object = status.get("state", {}).get("terminated") or {}
                return terminated
        return {}

    @cached_property
    def trainer_message(self) -> Object | None:
        """The termination message of the trainer; None where it is anything but a JSON object."""
        try:
            parsed = json.loads(str(self.termination.get("message") or ""))
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, dict) else None

    @cached_property
    def last_words(self) -> str:
        """The message in a trainer's termination message, or the message itself where it is plain text."""
        if self.trainer_message is None:
            return plain(str(self.termination.get("message") or "").strip())
        return plain(str(self.trainer_message.get("message", "")))

    @property
    def runs_trainer(self) -> bool:
        """It runs our trainer, and not a loop of the user's own."""
        containers: Sequence[Object] = self.raw.get("spec", {}).get("containers") or ()
        ours = (container for container in containers if container["name"] == constants.CONTAINER_NAME)
        return any(container.get("command") == constants.TRAINER_COMMAND for container in ours)

    @property
    def exit_code(self) -> int | None:
        return self.termination.get("exitCode")


@dataclass(frozen=True)
class Observed:
    """The job, its workers' pods (`domain.ownership` says which they are), what its workers have said, and what
    this operator has noted of it; None for somebody who only looks."""

    job: Object
    pods: tuple[WorkerPod, ...]
    inbox: Inbox = NOTHING_HEARD
    notes: Notes | None = None

    @staticmethod
    def of(job: Object, pods: Sequence[Object], inbox: Inbox = NOTHING_HEARD) -> "Observed":
        name = job["metadata"]["name"]
        workers = (pod for pod in pods if is_ours(pod, job) and worker_of(pod, name) is not None)
        return Observed(job, tuple(map(WorkerPod, workers)), inbox)

    def within(self, layout: SliceLayout) -> "Observed":
        """Without pods of slices and hosts that the job does not have."""
        places = layout.slices, layout.hosts_per_slice
        known = (pod for pod in self.pods if pod.worker.slice < places[0] and pod.worker.host < places[1])
        return replace(self, pods=tuple(known))

    @property
    def report(self) -> Report | None:
        """What a worker has said that is there still: an older job may have had the same name. Of a gang that is
        suspended the last word counts, although its worker goes right after it."""
        said = self.inbox.report
        if said is None or any(pod.uid == said.pod_uid for pod in self.pods):
            return said
        return said if self._is_suspended and said.attempt == self.job["status"].get("attempt") else None

    @property
    def _is_suspended(self) -> bool:
        conditions: Sequence[Object] = (self.job.get("status") or {}).get("conditions") or ()
        return any((condition["type"], condition["status"]) == ("Suspended", "True") for condition in conditions)

    def of_attempt(self, attempt: int) -> list[WorkerPod]:
        return sorted((p for p in self.pods if p.worker.attempt == attempt), key=lambda pod: pod.worker)

    def before_attempt(self, attempt: int) -> list[WorkerPod]:
        return sorted((p for p in self.pods if p.worker.attempt < attempt), key=lambda pod: pod.worker)


# What the planner reads of a pod, and what tells a person which one it was. A pod has twice as much in its
# managedFields alone, and the largest gang has five thousand pods.
#
# No field may be of a length that a user chooses: the owner references, finalizers and command of a pod, like its
# environment, can fill it.
_METADATA = ("name", "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
_SPEC = ("nodeName", "terminationGracePeriodSeconds")
_STATUS = ("phase", "reason", "message", "startTime", "conditions", "initContainerStatuses", "containerStatuses")
_LABELS = (constants.LABEL_JOB_NAME, *constants.WORKER_LABELS)
_OWNER = ("apiVersion", "kind", "name", "uid", "controller")
_TRAINER = {"name": constants.CONTAINER_NAME, "command": constants.TRAINER_COMMAND}
_CONTAINER_STATUS = ("name", "state", "lastState", "ready", "restartCount")


def slim(pod: Object) -> dict[str, Any]:
    """The pod with the fields that the planner reads: every plan is the same as with all of them."""
    status = _only(pod.get("status") or {}, _STATUS)
    for name in ("initContainerStatuses", "containerStatuses"):
        if containers := status.get(name):
            status[name] = [_only(container, _CONTAINER_STATUS) for container in containers]
    metadata = _only(pod["metadata"], _METADATA)
    owner = controller(pod)
    metadata["ownerReferences"] = [_only(owner, _OWNER)] if owner else []
    metadata["labels"] = _only(pod["metadata"].get("labels") or {}, _LABELS)
    spec = _only(pod.get("spec") or {}, _SPEC)
    if WorkerPod(pod).runs_trainer:
        spec["containers"] = [_TRAINER]
    return {"metadata": metadata, "spec": spec, "status": status}


def slim_worker(pod: Object) -> dict[str, Any] | None:
    """The pod, if a job controls it; of other pods nothing is read, whatever label they have."""
    return slim(pod) if job_of(pod) else None


def job_of(raw: Object) -> str | None:
    """The name of the job that controls the object, by its owner reference; None where no job does."""
    owner = controller(raw)
    group = str(owner.get("apiVersion", "")).partition("/")[0]
    is_job = (group, owner.get("kind")) == (constants.GROUP, constants.KIND)
    return str(owner.get("name", "")) if is_job else None


def _only(fields: Object, names: Sequence[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


# Room on both sides: a deadline is added to a time, and a grace period is subtracted.
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(2200, 1, 1, tzinfo=UTC)
_SECONDS = re.compile(r"(\d{4})(-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)")


def parse_time(text: str) -> datetime:
    """A Kubernetes timestamp (RFC 3339) in UTC, between EARLIEST and LATEST.

    An API server accepts more than RFC 3339 as a `date-time`, and anybody may edit a status: a time without a zone is
    taken for UTC, and where only the date and the time of day can be read, they count. ValueError for other texts.
    """
    moment = _read_time(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    # Compared first: at the ends of the calendar a time cannot be converted.
    return min(max(moment, EARLIEST), LATEST).astimezone(UTC)


def _read_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.upper())
    except ValueError:
        found = _SECONDS.match(text)
        if found is None:
            raise ValueError(f"{text!r} is no time such as 2026-01-31T09:30:00Z") from None
        year, date, time = found.groups()
        # Go has a year 0, Python has none.
        return datetime.fromisoformat(f"{max(int(year), 1):04}{date}T{time}+00:00")


def format_time(moment: datetime) -> str:
    """A moment in UTC, as Kubernetes writes it."""
    return moment.replace(microsecond=0, tzinfo=None).isoformat() + "Z"
