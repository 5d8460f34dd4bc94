"""Reads what a plan needs to know about a job's queue: one request for a job in a queue, none for any other.

The request for the Workload itself shows which version of Kueue's API the cluster has, so the operator needs no right
to read the definitions of other kinds.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tpu_training_operator.api import constants
from tpu_training_operator.domain.cluster_state.multikueue import prebuilt_workload
from tpu_training_operator.domain.cluster_state.ownership import Claim, claim
from tpu_training_operator.domain.cluster_state.workload import (
    Priority,
    Queue,
    Workload,
    has_several_slices,
    is_in_queue,
    queue_of,
    workload_name,
)
from tpu_training_operator.kube.cluster import (
    KUEUE_VERSIONS,
    PRIORITY_CLASSES,
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    ClusterReader,
    Object,
    Resource,
)
from tpu_training_operator.kube.errors import Forbidden, NotFound

# Admissions whose flavors are kept: every pass over a job needs them again.
_MOST = 512


class Queues:
    """`on_kind_found` is called with the kind Workload once the cluster is known to have it."""

    def __init__(self, cluster: ClusterReader, on_kind_found: Callable[[Resource], None] = lambda kind: None) -> None:
        self._cluster = cluster
        self._on_kind_found = on_kind_found
        self._version = KUEUE_VERSIONS[0]
        self._flavors: OrderedDict[tuple[str, tuple[str, ...]], tuple[Object, ...]] = OrderedDict()

    async def of(self, job: Mapping[str, object]) -> Queue | None:
        """Reads the job's queue; None for a job that is not Kueue's concern. Raises ApiError."""
        body: Object = dict(job)
        if not is_in_queue(body):
            return None
        queue, metadata = queue_of(body), body["metadata"]
        prebuilt = prebuilt_workload(body)
        name = prebuilt or workload_name(metadata["name"], metadata["uid"])
        has_several = has_several_slices(body) and not prebuilt
        try:
            version, workloads = await self._workloads(metadata, "" if has_several else name)
        except Forbidden as error:
            problem = f"the operator may not read Workloads; install its chart with kueue.enabled=true: {error}"
            return Queue(queue, problem=problem)
        if not version:
            problem = (
                f"the job's label {constants.LABEL_QUEUE} names queue {queue}, but this cluster has no Kueue"
                f" ({' or '.join(KUEUE_VERSIONS)}): install it, or create the job without the label"
            )
            return Queue(queue, problem=problem)
        if has_several:
            return await self._of_slices(body, Queue(queue, version), workloads)
        workload = next(map(Workload, workloads), None)
        if workload is None and prebuilt:
            problem = (
                f"Workload {prebuilt}, which {constants.PREBUILT_WORKLOAD} of the job names, does not exist; whoever"
                " created the job, such as Kueue in another cluster, must create it"
            )
            return Queue(queue, version, problem=problem, is_prebuilt=True)
        if workload is None:
            # Without a label and without a Workload, the job has left its queue.
            return await self._unqueued(body, Queue(queue, version)) if queue else None
        if claim(workload.raw, body) is Claim.FOREIGN and not (prebuilt and workload.is_unowned):
            problem = f"Workload {name} exists and has another owner; delete it"
            return Queue(queue, version, problem=problem)
        known = Queue(queue, version, workload, is_prebuilt=bool(prebuilt))
        return await self._with_flavors(await self._with_new_priority(body, known))

    async def _of_slices(self, job: Object, queue: Queue, workloads: Sequence[Object]) -> Queue | None:
        """Returns the queue with the job's own Workloads, one for each slice for which it has asked."""
        bodies = [body for body in workloads if claim(body, job) is Claim.OURS]
        if not bodies and not queue.name:
            return None
        queues = [replace(queue, workload=Workload(body)) for body in bodies]
        others = [await self._with_flavors(await self._with_new_priority(job, slice_queue)) for slice_queue in queues]
        return replace(await self._unqueued(job, queue), others=tuple(others))

    async def _workloads(self, job: Object, name: str) -> tuple[str, list[Object]]:
        """Returns the version of Kueue's API, empty without one, and the Workload of this name, if it exists; without a
        name, all Workloads that may belong to the job. `job`: its metadata."""
        namespace, labels = job["namespace"], {constants.LABEL_JOB_NAME: job["name"]}
        for version in sorted(KUEUE_VERSIONS, key=lambda version: version != self._version):
            kind = WORKLOADS[version]
            try:
                get = self._cluster.get(kind, namespace, name) if name else None
                bodies = [await get] if get else await self._cluster.list(kind, namespace, labels)
            except NotFound as error:
                # Without a reason, the API server does not know the kind.
                if error.reason != "NotFound":
                    continue
                bodies = []
            self._version = version
            self._on_kind_found(kind)
            return version, bodies
        return "", []

    async def _unqueued(self, job: Object, queue: Queue) -> Queue:
        """Returns the queue with the priority for the Workload that is to be created."""
        trainer = (job.get("spec") or {}).get("trainer") or {}
        if name := _priority_class(job):
            return await self._with_priority(queue, WORKLOAD_PRIORITY_CLASSES[queue.version], name)
        if of_pods := trainer.get("priorityClassName"):
            return await self._with_priority(queue, PRIORITY_CLASSES, of_pods)
        return queue

    async def _with_new_priority(self, job: Object, queue: Queue) -> Queue:
        """Returns the queue with a new priority if the job still waits and its label names another class than its
        Workload has."""
        workload, name = queue.workload, _priority_class(job)
        if not name or workload is None or queue.is_prebuilt or workload.holds_quota or workload.is_finished:
            return queue
        source = workload.raw["spec"].get("priorityClassRef") or workload.raw["spec"].get("priorityClassSource")
        if constants.KUEUE_GROUP in str(source) and workload.priority_class == name:
            return queue
        return await self._with_priority(queue, WORKLOAD_PRIORITY_CLASSES[queue.version], name)

    async def _with_priority(self, queue: Queue, resource: Resource, name: str) -> Queue:
        group = resource.api_version.partition("/")[0]
        body, problem = await self._class(resource, name)
        if body is None:
            return replace(queue, problem=problem)
        return replace(queue, priority=Priority(group, name, int(body.get("value", 0))))

    async def _with_flavors(self, queue: Queue) -> Queue:
        """Returns the queue with the flavors of an admission, which say where the workers go."""
        workload = queue.workload
        if workload is None or not workload.is_admitted:
            return queue
        if workload.assignment.get("topologyAssignment"):
            problem = (
                f"Workload {workload.name} was given places by Kueue's topology-aware scheduling, which this operator"
                " does not support: a slice already is one node pool; use a ResourceFlavor without topologyName"
            )
            return replace(queue, problem=problem)
        key = str(workload.raw["metadata"]["uid"]), workload.flavors
        if key not in self._flavors:
            flavors = []
            for name in workload.flavors:
                flavor, problem = await self._class(RESOURCE_FLAVORS[queue.version], name)
                if flavor is None:
                    return replace(queue, problem=problem)
                flavors.append(flavor)
            self._flavors[key] = tuple(flavors)
            if len(self._flavors) > _MOST:
                self._flavors.popitem(last=False)
        return replace(queue, flavors=self._flavors[key])

    async def _class(self, resource: Resource, name: str) -> tuple[Object | None, str]:
        """Returns a cluster-scoped object, or what to do about its absence."""
        try:
            return await self._cluster.get(resource, "", name), ""
        except NotFound:
            return None, f"{resource.kind} {name} does not exist; ask an administrator for it, or name another one"
        except Forbidden as error:
            return None, f"the operator may not read {resource.kind} {name}; its chart grants it: {error}"


def _priority_class(job: Object) -> str:
    return str((job["metadata"].get("labels") or {}).get(constants.LABEL_QUEUE_PRIORITY) or "")
