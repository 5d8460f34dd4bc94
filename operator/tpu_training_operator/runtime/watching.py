"""Watches jobs and their pods, in each served namespace or in all: fills the memory of the passes, and says which job
may need one.

A change costs no task and no request. Its job is enqueued, and a change of a pod that no plan can see is not even that.
The pods of a gang start and stop one by one, and a pass reads them all. So a pass is due at once when the first of them
ends, and when the last of them has its address, is ready or is gone; what comes between can wait a moment.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey
from tpu_training_operator.kube.errors import Unavailable
from tpu_training_operator.kube.informer import Informer
from tpu_training_operator.kube.replica import Change, Name
from tpu_training_operator.runtime.cached_cluster import Served
from tpu_training_operator.runtime.records import JobRecord, PodRecord, Stage, keep_job, keep_pod

# The API server ends an idle watch after less than a minute. The planner counts on reads that are not older than five.
_TRUSTED_SECONDS = 120.0
# Jobs are listed after pods, so that the first passes find their pods in memory, but not if pods cannot be listed.
_PATIENCE_SECONDS = 10.0


class Haste(Enum):
    """How soon a job should have its pass."""

    FIRST = auto()
    """Before jobs that have just come: hosts stand idle, or somebody has changed the job."""
    NOW = auto()
    SOON = auto()
    """More of the same is about to come."""
    IDLE = auto()
    """It was only listed, so perhaps nothing has happened to it."""


# What hears of a job: its key, the job's resourceVersion if it is the job that changed, and how soon it needs a pass.
Hint = Callable[[JobKey, str | None, Haste], None]
_ENDINGS = (Stage.STOPPING, Stage.ENDED)


@dataclass(frozen=True)
class _Watched:
    jobs: Informer[JobRecord]
    pods: Informer[PodRecord]
    served: Served


class Watching:
    """Without `namespaces`: all of them."""

    def __init__(self, client: Client, namespaces: Sequence[str], hint: Hint) -> None:
        self._hint = hint
        self._began = time.monotonic()
        self.is_running = True
        self._watched = {namespace: self._watch(client, namespace) for namespace in namespaces or (None,)}

    def served(self, namespace: str | None) -> Served | None:
        found = self._watched.get(namespace) or self._watched.get(None)
        return found.served if found else None

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for watched in self._watched.values():
                    tasks.create_task(watched.pods.run())
                    tasks.create_task(_run_after(watched.jobs, watched.pods))
        finally:
            self.is_running = False

    def longest_standstill_seconds(self) -> float:
        """The longest time in which one of the informers has neither heard anything nor failed."""
        return time.monotonic() - min(informer.moved_at for informer in self._informers())

    def longest_silence_seconds(self) -> float:
        """The longest time for which one of the informers has not heard from the API server; since the start, if it
        never has."""
        return time.monotonic() - min(max(informer.heard_at, self._began) for informer in self._informers())

    def _informers(self) -> list[Informer[Any]]:
        return [informer for each in self._watched.values() for informer in (each.jobs, each.pods)]

    def _watch(self, client: Client, namespace: str | None) -> _Watched:
        def is_current() -> bool:
            oldest = time.monotonic() - _TRUSTED_SECONDS
            return all(informer.is_listed and informer.heard_at > oldest for informer in (jobs, pods))

        async def listed() -> None:
            await jobs.has_tried.wait()
            if not jobs.is_listed:
                raise Unavailable(0, "NotListed", jobs.trouble or "they are not listed yet")

        served = Served(is_current, listed)
        hints = _Hints(served, self._hint)
        jobs = Informer(
            client,
            Selection(JOBS, namespace),
            keep_job,
            replica=served.jobs,
            changed=hints.job_changed,
            updated=lambda: hints.all_listed() if jobs.is_listed else None,
            is_patient=True,
        )
        pods = Informer(
            client,
            Selection(PODS, namespace, {LABEL_JOB_NAME: None}),
            keep_pod,
            replica=served.pods,
            changed=hints.pod_changed,
            is_patient=True,
        )
        return _Watched(jobs, pods, served)


class _Hints:
    """What is only listed is told when all jobs are listed, so that its passes find them in memory."""

    def __init__(self, served: Served, hint: Hint) -> None:
        self._served = served
        self._hint = hint
        self._are_listed = False
        self._waiting: dict[JobKey, JobRecord] = {}

    def job_changed(self, change: Change[JobRecord]) -> None:
        if not change.only_listed:
            haste = Haste.NOW if change.before is None else Haste.FIRST
            self._hint(JobKey(*change.name), None if change.after is None else str(change.number), haste)
        elif change.after is not None and (not change.after.is_at_rest or self._runs(change.name)):
            # Such a job needs no pass unless its workers still run; the resync knows when its time to live is over.
            self._waiting[JobKey(*change.name)] = change.after

    def pod_changed(self, change: Change[PodRecord]) -> None:
        # Pods are listed before jobs, unless that fails at first.
        if change.only_listed and (not self._are_listed or change.after is None or change.after.has_ended):
            return
        haste = Haste.IDLE if change.only_listed else self._haste(change)
        for job in {record.job for record in (change.before, change.after) if record is not None and record.is_hint}:
            self._hint(JobKey(change.name[0], job), None, haste)

    def _haste(self, change: Change[PodRecord]) -> Haste:
        if not self._completes(change):
            return Haste.SOON
        return Haste.FIRST if change.after is None or change.after.stage in _ENDINGS else Haste.NOW

    def _completes(self, change: Change[PodRecord]) -> bool:
        """Whether the pod is the last of its attempt to leave its stage, or the first to end."""
        before, after, pods, namespace = change.before, change.after, self._served.pods, change.name[0]
        if before is None or (after is not None and after.stage is before.stage):
            return False
        if pods.count(namespace, before) == 0:
            return True
        return after is not None and after.stage in _ENDINGS and pods.count(namespace, after) == 1

    def all_listed(self) -> None:
        self._are_listed = True
        for key, job in self._waiting.items():
            self._hint(key, None, Haste.FIRST if self._stands_idle(key, job) else Haste.IDLE)
        self._waiting.clear()

    def _stands_idle(self, key: JobKey, job: JobRecord) -> bool:
        """Whether one of its workers has ended or is missing, so that the others wait for it."""
        gang = self._served.pods.gang(key.namespace, key.name)
        stages = [record.stage for _, record in gang if record.is_hint and record.attempt == job.attempt]
        is_broken = len(stages) < job.hosts or any(stage in _ENDINGS for stage in stages)
        return job.is_restarting or (job.hosts > 0 and is_broken)

    def _runs(self, name: Name) -> bool:
        return any(not record.has_ended for _, record in self._served.pods.gang(*name))


async def _run_after(second: Informer[Any], first: Informer[Any]) -> None:
    # Not wait_for: Python 3.11's loses a cancellation that comes together with what it waits for, and the operator
    # would never stop.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await first.has_tried.wait()
    await second.run()
