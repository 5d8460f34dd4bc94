"""Reads what a plan needs to know of a job's queue: one request for a job in a queue, and none for any other.

Which version of Kueue's API the cluster has is found out by asking for the Workload itself, so the operator needs no
right to read the definitions of other kinds.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from tpu_training_operator.api import constants
from tpu_training_operator.domain.ownership import Claim, claim
from tpu_training_operator.domain.workload import Priority, Queue, Workload, is_in_queue, queue_of, workload_name
from tpu_training_operator.kube.cluster import (
    KUEUE_VERSIONS,
    PRIORITY_CLASSES,
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    Object,
    Reader,
    Resource,
)
from tpu_training_operator.kube.errors import Forbidden, NotFound

# Admissions whose flavors are remembered: a job asks for them again with every pass.
_MOST = 512


class Queues:
    """`found`: hears of the kind Workload, once the cluster is known to have it."""

    def __init__(self, cluster: Reader, found: Callable[[Resource], None] = lambda kind: None) -> None:
        self._cluster = cluster
        self._found = found
        self._version = KUEUE_VERSIONS[0]
        self._flavors: OrderedDict[tuple[str, tuple[str, ...]], tuple[Object, ...]] = OrderedDict()

    async def of(self, job: Mapping[str, object]) -> Queue | None:
        """None for a job that has nothing to do with Kueue. Raises ApiError."""
        body: Object = dict(job)
        if not is_in_queue(body):
            return None
        queue, metadata = queue_of(body), body["metadata"]
        name = workload_name(metadata["name"], metadata["uid"])
        try:
            version, found = await self._workload(metadata["namespace"], name)
        except Forbidden as error:
            problem = f"the operator may not read Workloads; install its chart with kueue.enabled=true: {error}"
            return Queue(queue, problem=problem)
        if not version:
            problem = (
                f"the job's label {constants.LABEL_QUEUE} names queue {queue}, but this cluster has no Kueue"
                f" ({' or '.join(KUEUE_VERSIONS)}): install it, or create the job without the label"
            )
            return Queue(queue, problem=problem)
        if found is None:
            # Without a label and without a Workload, the job has left its queue.
            return await self._unqueued(body, Queue(queue, version)) if queue else None
        if claim(found, body) is Claim.FOREIGN:
            problem = f"Workload {name} exists and belongs to somebody else; delete it"
            return Queue(queue, version, problem=problem)
        return await self._queued(Queue(queue, version, Workload(found)))

    async def _workload(self, namespace: str, name: str) -> tuple[str, Object | None]:
        """The version of Kueue's API, empty without one, and the Workload, if it exists."""
        for version in sorted(KUEUE_VERSIONS, key=lambda each: each != self._version):
            try:
                found = await self._cluster.get(WORKLOADS[version], namespace, name)
            except NotFound as error:
                # Without a reason it is the kind that the API server does not know.
                if error.reason != "NotFound":
                    continue
                found = None
            self._version = version
            self._found(WORKLOADS[version])
            return version, found
        return "", None

    async def _unqueued(self, job: Object, queue: Queue) -> Queue:
        """With the priority, which the Workload is created with."""
        labels, trainer = job["metadata"].get("labels") or {}, (job.get("spec") or {}).get("trainer") or {}
        if name := labels.get(constants.LABEL_QUEUE_PRIORITY):
            resource, group = WORKLOAD_PRIORITY_CLASSES[queue.version], constants.KUEUE_GROUP
        elif name := trainer.get("priorityClassName"):
            resource, group = PRIORITY_CLASSES, "scheduling.k8s.io"
        else:
            return queue
        found, problem = await self._class(resource, name)
        if found is None:
            return Queue(queue.name, queue.version, problem=problem)
        return Queue(queue.name, queue.version, priority=Priority(group, name, int(found.get("value", 0))))

    async def _queued(self, queue: Queue) -> Queue:
        """With the flavors, which say where the workers go."""
        found = queue.workload
        if found is None or not found.is_admitted:
            return queue
        if found.assignment.get("topologyAssignment"):
            problem = (
                f"Workload {found.name} was given places by Kueue's topology-aware scheduling, which this operator does"
                " not follow: a slice already is one node pool; use a ResourceFlavor without topologyName"
            )
            return Queue(queue.name, queue.version, found, problem=problem)
        key = str(found.raw["metadata"]["uid"]), found.flavors
        if key not in self._flavors:
            flavors = []
            for name in found.flavors:
                flavor, problem = await self._class(RESOURCE_FLAVORS[queue.version], name)
                if flavor is None:
                    return Queue(queue.name, queue.version, found, problem=problem)
                flavors.append(flavor)
            self._flavors[key] = tuple(flavors)
            if len(self._flavors) > _MOST:
                self._flavors.popitem(last=False)
        return Queue(queue.name, queue.version, found, flavors=self._flavors[key])

    async def _class(self, resource: Resource, name: str) -> tuple[Object | None, str]:
        """An object of the whole cluster, or what to do about its absence."""
        try:
            return await self._cluster.get(resource, "", name), ""
        except NotFound:
            return None, f"{resource.kind} {name} does not exist; ask an administrator for it, or name another one"
        except Forbidden as error:
            return None, f"the operator may not read {resource.kind} {name}; its chart grants it: {error}"
