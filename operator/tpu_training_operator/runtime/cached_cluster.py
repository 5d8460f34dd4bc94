"""The cluster as passes see it: jobs and pods from memory, everything else from the API server.

kopf, informers and the answers to this process's own requests fill the memory, so a pass sees what an earlier one did.
It may be behind the changes of others. `fresh` bypasses it, for decisions that must not rest on old reads
(`domain.plan.plan`), and adds its answers to the memory. Memory is not used if the API server has not confirmed it for
minutes, or if an unanswered request may have made it wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.kube.cluster import JOBS, PODS, Cluster, Object, Resource, resource_of
from tpu_training_operator.kube.encoding import decode
from tpu_training_operator.kube.errors import ApiError, Conflict, NotFound, Unavailable
from tpu_training_operator.kube.replica import Name, Replica, Version
from tpu_training_operator.runtime.records import JobRecord, KnownJobs, KnownPods, PodRecord, keep_job, keep_pod

T = TypeVar("T")

# Pods that are parsed before other tasks of this process have their turn.
_PARSED_AT_ONCE = 200


class Served:
    """The memory of one served namespace, or of all. `is_current`: whether the API server has confirmed it
    lately. `listed`: returns when the jobs are complete; raises ApiError if they cannot be listed."""

    def __init__(self, jobs: KnownJobs, is_current: Callable[[], bool], listed: Callable[[], Awaitable[None]]) -> None:
        self.is_current = is_current
        self.listed = listed
        self.jobs = jobs
        self.pods = KnownPods()
        # Names of jobs that may have changed unseen, and of jobs for which workers may have been created unseen.
        self.doubted_jobs: set[Name] = set()
        self.doubted_gangs: set[Name] = set()


class CachedCluster:
    """Implements the `Cluster` protocol. `served` returns the memory of a namespace; None if it is not served."""

    def __init__(self, cluster: Cluster, served: Callable[[str | None], Served | None]) -> None:
        self._cluster = cluster
        self._served = served
        self.fresh = Fresh(cluster, served)

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        served = self._served(namespace)
        if resource is JOBS and served and served.is_current() and (namespace, name) not in served.doubted_jobs:
            record = served.jobs.get((namespace, name))
            if record is None:
                raise NotFound(404, "NotFound", f"there is no job {name}")
            if record.full is not None:
                known: Object = decode(record.full)
                return known
        return await self.fresh.get(resource, namespace, name)

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        served = self._served(namespace)
        if resource is JOBS and served and not labels and not fields:
            await served.listed()
            jobs = served.jobs.items()
            return [decode(record.slim) for name, record in jobs if namespace in (None, name[0])]
        gang = _gang(resource, namespace, labels, fields)
        if gang and served and served.is_current() and gang not in served.doubted_gangs:
            return await _parse_all([record.body for _, record in served.pods.gang(*gang)])
        return await self.fresh.list(resource, namespace, labels, fields)

    async def create(self, body: Object) -> Object:
        namespace = body["metadata"].get("namespace")
        served = self._served(namespace)
        try:
            created = await self._cluster.create(body)
        except Unavailable:
            if resource_of(body) is PODS and served:
                # The pod may exist although no answer came.
                served.doubted_gangs.add((namespace, body["metadata"].get("labels", {}).get(LABEL_JOB_NAME, "")))
            raise
        _learn(served, resource_of(body), namespace, created)
        return created

    async def update(self, body: Object) -> Object:
        return await self._cluster.update(body)

    async def update_status(self, body: Object) -> Object:
        metadata = body["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        served = self._served(namespace)
        try:
            written = await self._cluster.update_status(body)
        except ApiError:
            # The job was changed by another client, or by this write, whose answer was lost.
            if resource_of(body) is JOBS and served:
                served.doubted_jobs.add((namespace, name))
            raise
        _learn(served, resource_of(body), namespace, written)
        return written

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> Object | None:
        served = self._served(namespace)
        replica = _replica(served, resource)
        try:
            marked = await self._cluster.delete(resource, namespace, name, uid, grace_seconds=grace_seconds)
        except (NotFound, Conflict):
            if replica is not None:
                # It seems to be gone, but a webhook can deny a deletion with any status, even 404.
                with suppress(ApiError):
                    await self.fresh.get(resource, namespace, name)
            raise
        if marked is None and replica is not None:
            replica.mark_gone((namespace, name), uid)
        elif marked is not None and "deletionTimestamp" in marked["metadata"]:
            _learn(served, resource, namespace, marked)
        return marked


class Fresh:
    """Reads from the API server, and adds the answers to the memory."""

    def __init__(self, cluster: Cluster, served: Callable[[str | None], Served | None]) -> None:
        self._cluster = cluster
        self._served = served

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        served, key = self._served(namespace), (namespace, name)
        replica = _replica(served, resource)
        uid = replica.uid(key) if replica is not None else None
        try:
            body = await self._cluster.get(resource, namespace, name)
        except NotFound as error:
            # Without a reason, a server that has just started does not know the kind yet.
            if replica is not None and uid is not None and error.reason == "NotFound":
                replica.mark_gone(key, uid)
            if served and resource is JOBS:
                served.doubted_jobs.discard(key)
            raise
        _learn(served, resource, namespace, body)
        if served and resource is JOBS:
            served.doubted_jobs.discard(key)
        return body

    def is_as_created(self, job: Object) -> bool:
        """Returns whether nobody has written the job since its creation, so that it cannot have workers, unless it has
        been written since it was read."""
        metadata = job["metadata"]
        name, served = (metadata["namespace"], metadata["name"]), self._served(metadata["namespace"])
        record = served.jobs.get(name) if served else None
        return (
            served is not None
            and record is not None
            and record.is_as_created
            and served.jobs.number(name) == int(metadata["resourceVersion"])
        )

    def end_of(self, namespace: str, pod: str) -> Object | None:
        served = self._served(namespace)
        body = served.pods.end_of((namespace, pod)) if served else None
        return None if body is None else decode(body)

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        gang, served = _gang(resource, namespace, labels, fields), self._served(namespace)
        if gang is None or served is None:
            return await self._cluster.list(resource, namespace, labels, fields)
        known = {name: served.pods.uid(name) for name, _ in served.pods.gang(*gang)}
        # Before the request: a pod that is created in the meantime may be missing in the answer.
        served.doubted_gangs.discard(gang)
        try:
            pods = await self._cluster.list(resource, namespace, labels, fields)
        except BaseException:
            served.doubted_gangs.add(gang)
            raise
        uids = set()
        for pod in pods:
            uids.add(pod["metadata"]["uid"])
            _learn(served, resource, gang[0], pod)
        for name, uid in known.items():
            if uid is not None and uid not in uids:
                served.pods.mark_gone(name, uid)
        return pods


def _gang(
    resource: Resource, namespace: str | None, labels: Mapping[str, str] | None, fields: Mapping[str, str] | None
) -> Name | None:
    """Returns namespace and name of the job whose gang is selected; None if the selection is another one."""
    if resource is not PODS or namespace is None or fields or not labels or labels.keys() != {LABEL_JOB_NAME}:
        return None
    return namespace, labels[LABEL_JOB_NAME]


def _replica(served: Served | None, resource: Resource) -> Replica[JobRecord] | Replica[PodRecord] | None:
    if served is not None and resource is JOBS:
        return served.jobs
    return served.pods if served is not None and resource is PODS else None


def _learn(served: Served | None, resource: Resource, namespace: str, body: Object) -> None:
    if served is None:
        return
    if resource is JOBS:
        served.jobs.apply_answer(_version(body, namespace, keep_job(body)))
    elif resource is PODS:
        served.pods.apply_answer(_version(body, namespace, keep_pod(body)))


def _version(body: Object, namespace: str, record: T | None) -> Version[T]:
    metadata = body["metadata"]
    return Version((namespace, metadata["name"]), metadata["uid"], int(metadata["resourceVersion"]), record)


async def _parse_all(bodies: list[bytes]) -> list[Object]:
    objects: list[Object] = []
    for start in range(0, len(bodies), _PARSED_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        objects += [decode(body) for body in bodies[start : start + _PARSED_AT_ONCE]]
    return objects
