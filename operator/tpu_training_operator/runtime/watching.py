"""Watches pods and Workloads in the served namespaces, and hints at jobs that may need a pass. kopf reports changes of
the jobs themselves (`runtime.job_watch`).

A change of a pod costs no request, and is a hint only if a plan can see it. The pods of a gang start and stop one by
one, and a pass reads them all. So a pass is due at once when the first of them ends, and when the last of them has its
address, is ready or is gone; other changes can wait a moment.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.domain.cluster_state.ownership import job_of
from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import PODS, JobKey, Object, Resource
from tpu_training_operator.kube.errors import Unavailable
from tpu_training_operator.kube.informer import Informer
from tpu_training_operator.kube.replica import Change, Name
from tpu_training_operator.runtime.cached_cluster import Served
from tpu_training_operator.runtime.controller import Haste, Hint
from tpu_training_operator.runtime.job_watch import JobWatch
from tpu_training_operator.runtime.records import JobRecord, PodRecord, PodStage, keep_pod

# The API server ends a watch after less than a minute. The planner relies on reads of the last five minutes.
_TRUSTED_SECONDS = 120.0
# Jobs wait for their pods to be listed, but not longer than this.
_PATIENCE_SECONDS = 10.0


_ENDINGS = (PodStage.STOPPING, PodStage.ENDED)


@dataclass(frozen=True)
class _WatchedNamespace:
    jobs: JobWatch
    pods: Informer[PodRecord]
    served: Served
    hints: "_Hints"


class Watching:
    """`job_watches`: the watches of jobs, which run already, by served namespace; by None if all are served."""

    def __init__(self, client: Client, job_watches: Mapping[str | None, JobWatch], hint: Hint) -> None:
        self._began = time.monotonic()
        self.is_running = True
        self._watched = {namespace: _watch(client, namespace, jobs, hint) for namespace, jobs in job_watches.items()}

    def served(self, namespace: str | None) -> Served | None:
        watched = self._watched.get(namespace) or self._watched.get(None)
        return watched.served if watched else None

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
        """Returns the longest time for which one of the watches has had neither news nor an error."""
        return time.monotonic() - min(informer.active_at for informer in self._informers())

    def longest_silence_seconds(self) -> float:
        """Returns the longest time for which the API server has not confirmed one of the watches; if it never has, the
        time since the start."""
        return time.monotonic() - min(max(informer.confirmed_at, self._began) for informer in self._informers())

    def _informers(self) -> list[Informer[Any]]:
        return [informer for watched in self._watched.values() for informer in (watched.jobs, watched.pods)]


def _watch(client: Client, namespace: str | None, jobs: JobWatch, hint: Hint) -> _WatchedNamespace:
    def is_current() -> bool:
        oldest = time.monotonic() - _TRUSTED_SECONDS
        return all(informer.is_listed and informer.confirmed_at > oldest for informer in (jobs, pods))

    async def listed() -> None:
        await jobs.has_tried.wait()
        if not jobs.is_listed:
            raise Unavailable(0, "NotListed", jobs.trouble or "the jobs are not listed yet")

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
    return _WatchedNamespace(jobs, pods, served, hints)


async def _begin(watched: _WatchedNamespace) -> None:
    """Gives the first hints when all jobs and their pods are known; without the pods if they cannot be listed."""
    # Not wait_for: Python 3.11's loses a cancellation that coincides with what it waits for, and the operator would not
    # stop.
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
        """Hints at all known jobs that may need a pass."""
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
        """Returns whether the pod is the last of its attempt to leave its stage, or the first to end."""
        before, after, pods, namespace = change.before, change.after, self._served.pods, change.name[0]
        if before is None or (after is not None and after.stage is before.stage):
            return False
        if pods.count(namespace, before) == 0:
            return True
        return after is not None and after.stage in _ENDINGS and pods.count(namespace, after) == 1

    def _stands_idle(self, key: JobKey, job: JobRecord) -> bool:
        """Returns whether one of the job's workers has ended or is missing, so that the others wait for it."""
        gang = self._served.pods.gang(key.namespace, key.name)
        stages = [record.stage for _, record in gang if record.is_hint and record.attempt == job.attempt]
        is_broken = len(stages) < job.hosts or any(stage in _ENDINGS for stage in stages)
        return job.is_restarting or (job.hosts > 0 and is_broken)

    def _runs(self, name: Name) -> bool:
        return any(not record.has_ended for _, record in self._served.pods.gang(*name))


# The job that owns a Workload, and the Workload's resourceVersion.
_WorkloadRecord = tuple[str, str]


class WorkloadWatching:
    """Watches the Workloads of jobs in queues, from the first such job on: a cluster without one gets no request.

    A change is only a hint, because a pass reads the Workload itself, and looks at a job in a queue from time to time
    anyway. So a watch that is broken or not allowed delays passes, and does no other harm. Without `namespaces`, all
    are served.
    """

    def __init__(self, client: Client, namespaces: Sequence[str], hint: Hint) -> None:
        self._client = client
        self._namespaces = namespaces or (None,)
        self._hint = hint
        self._kind: asyncio.Future[Resource] = asyncio.get_running_loop().create_future()

    def begin(self, kind: Resource) -> None:
        """Begins to watch, because there is a job in a queue. `kind`: Workloads in the version that the cluster has."""
        if not self._kind.done():
            self._kind.set_result(kind)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        kind = await self._kind
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._namespaces:
                selection = Selection(kind, namespace, {LABEL_JOB_NAME: None})
                informer = Informer(self._client, selection, _keep_workload, changed=self._changed, is_patient=True)
                tasks.create_task(informer.run())

    def _changed(self, change: Change[_WorkloadRecord]) -> None:
        haste = Haste.IDLE if change.only_listed else Haste.NOW
        for job in {record[0] for record in (change.before, change.after) if record is not None}:
            self._hint(JobKey(change.name[0], job), None, haste)


def _keep_workload(workload: Object) -> _WorkloadRecord | None:
    job = job_of(workload)
    return None if job is None else (job, str(workload["metadata"]["resourceVersion"]))
