"""Watches the pods of jobs, in each served namespace or in all, and says which job may need a pass: because it has
changed, which kopf reports (`runtime.job_watch`), or one of its pods.

A change costs no task and no request. Its job is enqueued, and a change of a pod that no plan can see is not even that.
The pods of a gang start and stop one by one, and a pass reads them all. So a pass is due at once when the first of them
ends, and when the last of them has its address, is ready or is gone; what comes between can wait a moment.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import PODS, JobKey
from tpu_training_operator.kube.errors import Unavailable
from tpu_training_operator.kube.informer import Informer
from tpu_training_operator.kube.replica import Change, Name
from tpu_training_operator.runtime.cached_cluster import Served
from tpu_training_operator.runtime.controller import Haste, Hint
from tpu_training_operator.runtime.job_watch import JobWatch
from tpu_training_operator.runtime.records import JobRecord, PodRecord, Stage, keep_pod

# The API server ends an idle watch after less than a minute. The planner counts on reads that are not older than five.
_TRUSTED_SECONDS = 120.0
# The first passes find their pods in memory, but happen also if pods cannot be listed.
_PATIENCE_SECONDS = 10.0


_ENDINGS = (Stage.STOPPING, Stage.ENDED)


@dataclass(frozen=True)
class _Watched:
    jobs: JobWatch
    pods: Informer[PodRecord]
    served: Served
    hints: "_Hints"


class Watching:
    """`job_watches`: by served namespace; by None if all are served. They run already."""

    def __init__(self, client: Client, job_watches: Mapping[str | None, JobWatch], hint: Hint) -> None:
        self._began = time.monotonic()
        self.is_running = True
        self._watched = {namespace: _watch(client, namespace, jobs, hint) for namespace, jobs in job_watches.items()}

    def served(self, namespace: str | None) -> Served | None:
        found = self._watched.get(namespace) or self._watched.get(None)
        return found.served if found else None

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for watched in self._watched.values():
                    tasks.create_task(watched.pods.run())
                    tasks.create_task(_begin(watched))
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


def _watch(client: Client, namespace: str | None, jobs: JobWatch, hint: Hint) -> _Watched:
    def is_current() -> bool:
        oldest = time.monotonic() - _TRUSTED_SECONDS
        return all(informer.is_listed and informer.heard_at > oldest for informer in (jobs, pods))

    async def listed() -> None:
        await jobs.has_tried.wait()
        if not jobs.is_listed:
            raise Unavailable(0, "NotListed", jobs.trouble or "they are not listed yet")

    served = Served(jobs.known, is_current, listed)
    hints = _Hints(served, hint)
    pods = Informer(
        client,
        Selection(PODS, namespace, {LABEL_JOB_NAME: None}),
        keep_pod,
        replica=served.pods,
        changed=hints.pod_changed,
        is_patient=True,
    )
    return _Watched(jobs, pods, served, hints)


async def _begin(watched: _Watched) -> None:
    """Gives the first hints when all jobs are known, and their pods, unless these cannot be listed."""
    # Not wait_for: Python 3.11's loses a cancellation that comes together with what it waits for, and the operator
    # would never stop.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await watched.pods.has_tried.wait()
    await watched.jobs.has_listed.wait()
    watched.hints.begin()
    watched.jobs.on_change = watched.hints.job_changed


class _Hints:
    def __init__(self, served: Served, hint: Hint) -> None:
        self._served = served
        self._hint = hint
        self._has_begun = False

    def begin(self) -> None:
        """Hints at every job that is known and may need a pass."""
        self._has_begun = True
        for name, job in self._served.jobs.items():
            # The resync knows when a job's time to live is over.
            if not job.is_at_rest or self._runs(name):
                key = JobKey(*name)
                self._hint(key, None, Haste.FIRST if self._stands_idle(key, job) else Haste.IDLE)

    def job_changed(self, change: Change[JobRecord]) -> None:
        haste = Haste.NOW if change.before is None else Haste.FIRST
        self._hint(JobKey(*change.name), None if change.after is None else str(change.number), haste)

    def pod_changed(self, change: Change[PodRecord]) -> None:
        # Pods are listed before the first hints, unless that fails at first.
        if change.only_listed and (not self._has_begun or change.after is None or change.after.has_ended):
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

    def _stands_idle(self, key: JobKey, job: JobRecord) -> bool:
        """Whether one of its workers has ended or is missing, so that the others wait for it."""
        gang = self._served.pods.gang(key.namespace, key.name)
        stages = [record.stage for _, record in gang if record.is_hint and record.attempt == job.attempt]
        is_broken = len(stages) < job.hosts or any(stage in _ENDINGS for stage in stages)
        return job.is_restarting or (job.hosts > 0 and is_broken)

    def _runs(self, name: Name) -> bool:
        return any(not record.has_ended for _, record in self._served.pods.gang(*name))
