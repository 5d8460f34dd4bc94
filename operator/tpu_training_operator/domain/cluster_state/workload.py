"""Kueue's Workload, as the planner reads and writes it.

A job in a queue owns one Workload. Its spec says what the job's workers need; in its status Kueue says whether the job
may have that. The conditions have the meaning and order that they have for Kueue's own jobs
(pkg/controller/jobframework and pkg/workload of Kueue 0.19 and later): whoever runs the pods also reports that they are
ready, gives the quota back after an eviction, and reports the end of the job.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.text import one_line, plain
from tpu_training_operator.domain.cluster_state.multikueue import is_managed_elsewhere, manager_of
from tpu_training_operator.domain.cluster_state.ownership import controller

Object = Mapping[str, Any]

POD_SET = "main"
# Characters of a message by Kueue, which lists each flavor that does not fit.
_LONGEST_WORDS = 1000
# Kueue uses the name as a label's value.
_LONGEST_NAME = 63
_HASH = 5
_REQUEUED_BY_KUEUE = ("Preempted", "NodeFailures")
# Reasons of the condition QuotaReserved, and words in its message where Kueue says only that the Workload is pending
# (pkg/scheduler/flavorassigner).
_NOT_ABOUT_QUOTA = ("Misconfigured", "Inadmissible", "Suspended")
_TOO_LARGE = ("ExceedsMaxQuota", "NoMatchingFlavor")
_DEACTIVATED = "Deactivated"
# Reasons of the condition Evicted: a check has rejected it, or its workers were not ready in time too often.
_GIVEN_UP = ("DeactivatedDueToAdmissionCheck", "DeactivatedDueToRequeuingLimitExceeded")
_KEPT_OUT = "namespace doesn't match ClusterQueue selector"
_WAITS = "insufficient unused quota"
_NEVER = ("> maximum capacity", "doesn't match node affinity", "unavailable in ClusterQueue", "untolerated taint")


def workload_name(job: str, uid: str, number: int = 0) -> str:
    """Returns a name that is unique among jobs of the same name. `number`: the slice's number among those of the
    job."""
    chosen = f"{constants.GROUP}/{constants.KIND}/{job}/{uid}" + (f"/{number}" if number else "")
    digest = hashlib.sha256(chosen.encode()).hexdigest()[:_HASH]
    return f"{constants.KIND.lower()}-{job}"[: _LONGEST_NAME - _HASH - 1] + f"-{digest}"


def queue_of(job: Object) -> str:
    """Returns the queue that the job's label names; empty if it names none."""
    return str((job["metadata"].get("labels") or {}).get(constants.LABEL_QUEUE) or "")


def has_several_slices(job: Object) -> bool:
    """Tells whether the job has a Workload for each slice on which it may run, one after the other."""
    spec = job.get("spec")
    return isinstance(spec, Mapping) and any(spec.get(name) is not None for name in ("placement", "ladder"))


def is_in_queue(job: Object) -> bool:
    """Tells whether Kueue is concerned with the job: its label names a queue, or it has been in one. Without its label,
    a job stays in the queue whose quota it uses."""
    if is_managed_elsewhere(job):
        return False
    if has_finished(job):
        return owes_an_end(job)
    return bool(queue_of(job)) or _admitted(job) is not None


def owes_an_end(job: Object) -> bool:
    """Tells whether the job has finished while its Workload may not show that yet, and so keep its quota. For a job
    that has run in another cluster, Kueue itself ends the Workload."""
    if manager_of(job):
        return False
    admitted = _admitted(job)
    if admitted is None:
        # An edit may have removed the condition.
        return has_finished(job) and bool(queue_of(job))
    return has_finished(job) and admitted.get("reason") != Reason.QUOTA_RELEASED


def has_finished(job: Object) -> bool:
    return (job.get("status") or {}).get("completionTime") is not None


def _admitted(job: Object) -> Object | None:
    conditions: Iterable[Object] = (job.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == ConditionType.ADMITTED), None)


@dataclass(frozen=True)
class Workload:
    """The Workload of a job. `raw`: as the API server returned it."""

    raw: Object

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def queue(self) -> str:
        return str(self.raw["spec"].get("queueName") or "")

    @property
    def version(self) -> str:
        return str(self.raw["apiVersion"])

    @property
    def uid(self) -> str:
        return str(self.raw["metadata"]["uid"])

    @property
    def priority_class(self) -> str:
        """The class that gives it its priority, in either version of the API; empty without one."""
        spec = self.raw["spec"]
        return str((spec.get("priorityClassRef") or {}).get("name") or spec.get("priorityClassName") or "")

    @property
    def is_active(self) -> bool:
        return self.raw["spec"].get("active") is not False

    @property
    def is_going(self) -> bool:
        return "deletionTimestamp" in self.raw["metadata"]

    @property
    def is_unowned(self) -> bool:
        """Whether no job owns it yet, as Kueue leaves the Workload of a copy."""
        return not controller(self.raw) and not self.is_going

    @property
    def holds_quota(self) -> bool:
        return self.is_true("QuotaReserved") or bool(self._status.get("admission"))

    @property
    def is_evicted(self) -> bool:
        return self.is_true("Evicted")

    @property
    def is_finished(self) -> bool:
        return self.is_true("Finished")

    @property
    def is_admitted(self) -> bool:
        """Whether workers may exist. An eviction leaves the quota with the job until its workers have stopped."""
        may = self.is_true("Admitted") and bool(self._status.get("admission")) and self.is_active
        return may and not (self.is_evicted or self.is_finished or self.is_going)

    @property
    def cluster_queue(self) -> str:
        return str((self._status.get("admission") or {}).get("clusterQueue") or "")

    @property
    def assignment(self) -> Object:
        """Kueue's assignment for the workers; empty before one is made."""
        assignments = (self._status.get("admission") or {}).get("podSetAssignments") or ()
        return next((pods for pods in assignments if pods.get("name", POD_SET) == POD_SET), {})

    @property
    def flavors(self) -> tuple[str, ...]:
        """The ResourceFlavors of the assignment, each once."""
        return tuple(dict.fromkeys((self.assignment.get("flavors") or {}).values()))

    @property
    def updates(self) -> list[tuple[str, Object]]:
        """The name of each admission check with what it adds to the workers' pods."""
        return [
            (str(check.get("name")), update)
            for check in self._status.get("admissionChecks") or ()
            for update in check.get("podSetUpdates") or ()
            if update.get("name", POD_SET) == POD_SET
        ]

    def is_true(self, kind: str) -> bool:
        return self.condition(kind).get("status") == "True"

    def condition(self, kind: str) -> Object:
        return self._conditions.get(kind, {})

    @cached_property
    def _conditions(self) -> Mapping[str, Object]:
        return {condition["type"]: condition for condition in self._status.get("conditions") or ()}

    @property
    def _status(self) -> Object:
        return self.raw.get("status") or {}

    @property
    def waits_in_line(self) -> bool:
        """Whether the Workload waits for quota, as far as Kueue says, so that another slice may be admitted instead.

        Kueue says nothing about a Workload behind the first one of a StrictFIFO queue, nor about a new one that is like
        another for which it has just found no quota. Such a Workload may wait as long as any other."""
        if not self.is_active or self.is_going or self.is_finished or (self.is_evicted and self.holds_quota):
            return False
        quota = self.condition("QuotaReserved")
        is_about_quota = quota.get("reason") not in _NOT_ABOUT_QUOTA and _KEPT_OUT not in str(quota.get("message"))
        return not self.is_admitted and is_about_quota

    @property
    def is_given_up(self) -> bool:
        """Whether Kueue has taken the Workload out of the queue because it could not be admitted. Another slice may
        be."""
        if self.is_active or self.holds_quota or self.is_going or self.is_finished:
            return False
        return self.is_evicted and self.condition("Evicted").get("reason") in _GIVEN_UP

    @property
    def is_too_large(self) -> bool:
        """Whether Kueue says that the Workload exceeds the quota even if no other job uses any."""
        quota = self.condition("QuotaReserved")
        if quota.get("status") != "False":
            return False
        if quota.get("reason") != "Pending":
            return quota.get("reason") in _TOO_LARGE
        # Up to Kueue 0.19, unless its feature gate UnadmittedWorkloadsObservability is on, only the message says so,
        # once for every flavor.
        message = str(quota.get("message") or "")
        return _WAITS not in message and any(words in message for words in _NEVER)

    @property
    def reserved_since(self) -> str | None:
        quota = self.condition("QuotaReserved")
        return str(quota.get("lastTransitionTime")) if quota.get("status") == "True" else None

    def waits_for(self) -> str:
        """Explains why the job is not admitted, with Kueue's own reason and message."""
        evicted = f"evicted by Kueue, {self._words('Evicted')}" if self.is_evicted else ""
        if evicted and (self.holds_quota or not self.is_active):
            return evicted
        if not self.is_active and self.holds_quota:
            return "its Workload was deactivated"
        if not self.is_true("QuotaReserved"):
            return self._explain_missing_quota(evicted)
        checks = self._status.get("admissionChecks") or ()
        unready = [check for check in checks if check.get("state") != "Ready"]
        lines = [_sentence(f"admission check {check.get('name')}", check.get("state"), check) for check in unready]
        return f"quota is reserved in {self.cluster_queue}; " + ("; ".join(lines) or self._words("Admitted"))

    def _explain_missing_quota(self, evicted: str) -> str:
        """Explains what the job lacks. `evicted`: why it lost its quota, the only reason until Kueue considers it
        again."""
        quota, before = self.condition("QuotaReserved"), self.condition("Evicted")
        is_news = bool(quota) and quota.get("message") != before.get("message")
        # The Workload is active again, so a deactivation is over.
        past = "" if str(before.get("reason")).startswith(_DEACTIVATED) else evicted
        if is_news and past:
            return f"{self._words('QuotaReserved')}; before that, {past}"
        return (self._words("QuotaReserved") if is_news else past) or "Kueue has not considered the job yet"

    def _words(self, kind: str) -> str:
        condition = self.condition(kind)
        return _sentence("", condition.get("reason"), condition) if condition else ""

    # Changes that are left to the job's own controller.

    def with_pods_ready(self, are_ready: bool, now: str) -> dict[str, Any] | None:
        """Returns the Workload with a report whether the workers run; None if it has that already. Kueue evicts a job
        whose workers do not start or recover within the times in its configuration."""
        before = self.condition("PodsReady")
        value, reason = _pods_ready(before, are_ready)
        if (before.get("status"), before.get("reason")) == (value, reason):
            return None
        message = "all workers are ready" if are_ready else "some workers are not ready"
        return self._with_status(self._status_without(), self._set("PodsReady", value, reason, message, now))

    def without_quota(self, now: str) -> dict[str, Any]:
        """Returns the Workload without its quota, after an eviction. Only Kueue decides what comes next."""
        evicted = self.condition("Evicted")
        reason, message = str(evicted.get("reason") or "Evicted"), str(evicted.get("message") or "")
        again = "True" if reason in _REQUEUED_BY_KUEUE else "False"
        # The reason without its suffix: Kueue requeues a Workload that is active again only if it finds exactly this
        # one.
        left_for = _DEACTIVATED if reason.startswith(_DEACTIVATED) else reason
        status = self._status_without("admission")
        if self.is_true("Admitted"):
            used = max(0, _seconds(self.condition("Admitted").get("lastTransitionTime"), now))
            before = self._status.get("accumulatedPastExecutionTimeSeconds") or 0
            status["accumulatedPastExecutionTimeSeconds"] = before + used
        changes = (
            self._set("QuotaReserved", "False", "Pending", message, now),
            self._set("Admitted", "False", "NoReservation", "The workload has no reservation", now),
            self._set("Requeued", again, left_for, message, now),
            self._set("PodsReady", "False", "WaitForStart", "no worker runs", now),
        )
        return self._with_status(status, *changes)

    def finished(self, has_succeeded: bool, message: str, now: str) -> dict[str, Any]:
        reason = "Succeeded" if has_succeeded else "Failed"
        return self._with_status(self._status_without(), self._set("Finished", "True", reason, message, now))

    def with_active(self, active: bool) -> dict[str, Any]:
        return {**self.raw, "spec": {**self.raw["spec"], "active": active}}

    def with_queue(self, queue: str) -> dict[str, Any]:
        return {**self.raw, "spec": {**self.raw["spec"], "queueName": queue}}

    def _set(self, kind: str, value: str, reason: str, message: str, now: str) -> dict[str, Any]:
        before = self.condition(kind)
        return {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message,
            "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == value else now,
            "observedGeneration": self.raw["metadata"].get("generation", 1),
        }

    def _status_without(self, *names: str) -> dict[str, Any]:
        return {name: value for name, value in self._status.items() if name not in names}

    def _with_status(self, status: dict[str, Any], *changed: dict[str, Any]) -> dict[str, Any]:
        conditions = {**self._conditions, **{condition["type"]: condition for condition in changed}}
        return {**self.raw, "status": {**status, "conditions": list(conditions.values())}}


def _pods_ready(before: Object, are_ready: bool) -> tuple[str, str]:
    has_run = before.get("status") == "True" or before.get("reason") in ("WaitForRecovery", "Recovered")
    if are_ready:
        recovers = before.get("reason") in ("WaitForRecovery", "Recovered")
        return "True", "Recovered" if recovers else "Started"
    return "False", "WaitForRecovery" if has_run else "WaitForStart"


def _sentence(subject: str, reason: Any, condition: Object) -> str:
    message = one_line(plain(str(condition.get("message") or "")), _LONGEST_WORDS)
    return ": ".join(part for part in (subject, plain(str(reason or "")), message) if part)


def _seconds(since: Any, now: str) -> int:
    try:
        began, ended = (datetime.fromisoformat(str(time).upper()) for time in (since, now))
        return int((ended - began).total_seconds())
    except (ValueError, TypeError):
        return 0


@dataclass(frozen=True)
class Priority:
    """A priority. `group`: the API group of its class, Kueue's or Kubernetes'."""

    group: str
    name: str
    value: int


@dataclass(frozen=True)
class Queue:
    """What the cluster says about a job in a queue.

    `name`: the queue that the job's label names. `version`: of Kueue's API; empty if the cluster has none. `flavors`:
    the ResourceFlavors of the assignment. `priority`: the one that the Workload still lacks. `problem`: what keeps the
    job from being queued or placed, and what would help. `is_prebuilt`: Kueue or a user made the Workload.
    `others`: the same for each further Workload: a job that may run on several slices has one for each.
    """

    name: str
    version: str = ""
    workload: Workload | None = None
    flavors: tuple[Object, ...] = ()
    priority: Priority | None = None
    problem: str = ""
    is_prebuilt: bool = False
    others: tuple["Queue", ...] = ()

    def at(self, name: str) -> "Queue":
        """Returns the queue's state for the Workload of this name, which may not exist."""
        chosen = next((other for other in self.others if other.workload and other.workload.name == name), self)
        return replace(chosen, others=tuple(other for other in self.others if other is not chosen))


@dataclass(frozen=True)
class PodSettings:
    """What Kueue adds to the workers' pods, each value with its origin. `conflicts`: values on which two origins
    disagree; the first one stays."""

    labels: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    annotations: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    node_selector: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    tolerations: tuple[Object, ...] = ()
    conflicts: tuple[str, ...] = ()


def pod_settings(queue: Queue) -> PodSettings:
    """Collects what Kueue adds to the pods: first from the flavors, then from the admission checks."""
    workload = queue.workload
    if workload is None:
        return PodSettings()
    labels, annotations, selector = _Values("labels"), _Values("annotations"), _Values("nodeSelector")
    tolerations: list[Object] = []
    for flavor in queue.flavors:
        spec, origin = flavor.get("spec") or {}, f"ResourceFlavor {flavor['metadata']['name']}"
        selector.add(spec.get("nodeLabels"), origin)
        _add(tolerations, spec.get("tolerations"))
    for check, update in workload.updates:
        origin = f"admission check {check}"
        labels.add(update.get("labels"), origin)
        annotations.add(update.get("annotations"), origin)
        selector.add(update.get("nodeSelector"), origin)
        _add(tolerations, update.get("tolerations"))
    conflicts = (*labels.conflicts, *annotations.conflicts, *selector.conflicts)
    return PodSettings(labels.values, annotations.values, selector.values, tuple(tolerations), conflicts)


class _Values:
    def __init__(self, field_name: str) -> None:
        self._field = field_name
        self.values: dict[str, tuple[str, str]] = {}
        self.conflicts: list[str] = []

    def add(self, values: Mapping[str, str] | None, origin: str) -> None:
        for key, value in (values or {}).items():
            known, before = self.values.setdefault(key, (value, origin))
            if known != value:
                self.conflicts.append(conflict(self._field, key, (known, before), (value, origin)))


def conflict(field_name: str, key: str, first: tuple[str, str], second: tuple[str, str]) -> str:
    """Describes two values that contradict each other, with their origins."""
    return f"{field_name} {key}: {first[1]} asks for {first[0]!r}, {second[1]} for {second[0]!r}"


def _add(tolerations: list[Object], more: Iterable[Object] | None) -> None:
    tolerations += [toleration for toleration in more or () if toleration not in tolerations]
