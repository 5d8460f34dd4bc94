"""Summarizes the hosts of a job: which are ready, and why the others are not.

The largest slices have thousands of hosts, so only a few words are kept for each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.text import one_line
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.cluster_state.ownership import controller, worker_of
from tpu_training_operator.domain.job.naming import WorkerId

_LONGEST_REASON = 300
_NO_POD = "no pod yet"
_TAKEN = (
    "Kueue's pod integration holds back each worker as a separate job. An administrator must list"
    f" {constants.KUEUE_FRAMEWORK} under integrations.externalFrameworks in Kueue's configuration, and the job must"
    f" name its queue in the label {constants.LABEL_QUEUE} (docs/kueue.md)"
)


@dataclass(frozen=True)
class Host:
    """The pod of one worker. `why`: what keeps it from being ready; None if it is ready or has succeeded. `has_ended`:
    it succeeded or failed. `is_unscheduled`: it waits for a node, and the scheduler knows why."""

    worker: WorkerId
    owner: str | None
    node: str | None
    why: str | None
    has_finished: bool = False
    has_ended: bool = False
    is_unscheduled: bool = False


@dataclass(frozen=True)
class HostGroup:
    """Hosts that are not ready for the same reason."""

    why: str
    workers: tuple[WorkerId, ...]
    nodes: tuple[str, ...]
    is_unscheduled: bool = False

    @property
    def places(self) -> tuple[str, ...]:
        """`slice/host` of each worker, in order."""
        return tuple(f"{worker.slice}/{worker.host}" for worker in self.workers)


def group_words(group: HostGroup) -> str:
    """Returns the group in words, such as "3 hosts: ImagePullBackOff: ..."."""
    return f"{count(len(group.workers), 'host')}: {group.why}"


@dataclass(frozen=True)
class Hosts:
    """The hosts of one attempt. `earlier`: pods of earlier attempts that still run."""

    total: int
    ready: int
    finished: int
    earlier: int
    others: tuple[HostGroup, ...]


def host_of(pod: Mapping[str, Any]) -> Host | None:
    """Reads the host of a pod; None if the pod is not a worker of the job that controls it."""
    worker_pod, worker = WorkerPod(pod), worker_of(pod, str(controller(pod).get("name", "")))
    if worker is None:
        return None
    has_finished = worker_pod.phase == "Succeeded"
    why = None if worker_pod.is_ready or has_finished else why_not_ready(worker_pod)
    is_unscheduled = worker_pod.node is None and not worker_pod.has_ended and not worker_pod.is_terminating
    return Host(
        worker, controller(pod).get("uid"), worker_pod.node, why, has_finished, worker_pod.has_ended, is_unscheduled
    )


def summarize_hosts(hosts: Iterable[Host], attempt: int, slices: int, hosts_per_slice: int) -> Hosts:
    """Counts the hosts of the attempt. The group that keeps others from their nodes comes first, then the largest."""
    by_worker = {host.worker: host for host in hosts}
    ready = finished = 0
    lacking: dict[str, dict[WorkerId, Host | None]] = {}
    for index in range(slices * hosts_per_slice):
        worker = WorkerId(attempt, *divmod(index, hosts_per_slice))
        host = by_worker.get(worker)
        if host is not None and host.why is None:
            finished += host.has_finished
            ready += not host.has_finished
        else:
            lacking.setdefault(host.why if host and host.why else _NO_POD, {})[worker] = host
    groups = [_group(why, members) for why, members in lacking.items()]
    return Hosts(
        total=slices * hosts_per_slice,
        ready=ready,
        finished=finished,
        earlier=sum(host.worker.attempt != attempt and not host.has_ended for host in by_worker.values()),
        others=tuple(sorted(groups, key=_urgency)),
    )


def _urgency(group: HostGroup) -> tuple[bool, int]:
    # Where host 0 of a slice lacks a node: the slice's other workers follow it to its node pool.
    delays_its_slice = group.is_unscheduled and any(worker.host == 0 for worker in group.workers)
    return not delays_its_slice, -len(group.workers)


def _group(why: str, members: Mapping[WorkerId, Host | None]) -> HostGroup:
    pods = [host for host in members.values() if host is not None]
    nodes = dict.fromkeys(pod.node for pod in pods if pod.node)
    return HostGroup(why, tuple(members), tuple(nodes), any(pod.is_unscheduled for pod in pods))


def why_not_ready(pod: WorkerPod) -> str:
    """Explains what a pod lacks that is neither ready nor has succeeded."""
    if pod.phase == "Failed":
        code = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
        reason = pod.termination.get("reason") or pod.raw["status"].get("reason") or "failed"
        return f"failed: {reason}{code}"
    if pod.is_terminating:
        return "stopping"
    if pod.was_taken_by_kueue:
        return _TAKEN
    if pod.node is None:
        message = str(pod.condition("PodScheduled").get("message") or "")
        return one_line(f"no node: {message}" if message else "no node yet", _LONGEST_REASON)
    reason, message = pod.waiting(sidecars=True)
    if reason:
        return one_line(f"{reason}: {message}" if message else reason, _LONGEST_REASON)
    return "running, not ready" if pod.phase == "Running" else "starting"
