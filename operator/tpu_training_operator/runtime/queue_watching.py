"""Watches the Workloads of jobs in queues, from the first such job on: a cluster without one is asked nothing.

What the watch tells is a hint that the job needs a pass, which reads the Workload itself. So a watch that is broken or
not allowed costs seconds, and nothing else: jobs in queues are looked at from time to time anyway.
"""

import asyncio
from collections.abc import Sequence

from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.domain.cluster_state.ownership import job_of
from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import JobKey, Object, Resource
from tpu_training_operator.kube.informer import Informer
from tpu_training_operator.kube.replica import Change
from tpu_training_operator.runtime.controller import Haste, Hint

# The job that owns the Workload, and the Workload's resourceVersion.
Seen = tuple[str, str]


class QueueWatching:
    """Without `namespaces`: all of them."""

    def __init__(self, client: Client, namespaces: Sequence[str], hint: Hint) -> None:
        self._client = client
        self._namespaces = namespaces or (None,)
        self._hint = hint
        self._kind: asyncio.Future[Resource] = asyncio.get_running_loop().create_future()

    def begin(self, kind: Resource) -> None:
        """There is a job in a queue. `kind`: Workloads in the version that the cluster has."""
        if not self._kind.done():
            self._kind.set_result(kind)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        kind = await self._kind
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._namespaces:
                selection = Selection(kind, namespace, {LABEL_JOB_NAME: None})
                informer = Informer(self._client, selection, _keep, changed=self._changed, is_patient=True)
                tasks.create_task(informer.run())

    def _changed(self, change: Change[Seen]) -> None:
        haste = Haste.IDLE if change.only_listed else Haste.NOW
        for job in {seen[0] for seen in (change.before, change.after) if seen is not None}:
            self._hint(JobKey(change.name[0], job), None, haste)


def _keep(workload: Object) -> Seen | None:
    job = job_of(workload)
    return None if job is None else (job, str(workload["metadata"]["resourceVersion"]))
