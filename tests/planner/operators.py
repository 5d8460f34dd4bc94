"""Operators on a `ModelCluster`: the real reconciler, with a cluster adapter in which anything can go wrong.

Each operator has its own inbox and its own memory of the cluster, which its watches fill, and loses both in a crash.
Its requests that change the cluster are its effects. Each can fail before or after it took effect, and the operator can
die between any two.
"""

import asyncio
import atexit
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

from tests.planner.model_cluster import ModelCluster, copied, key_of
from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.domain.cluster_state.observed import Observed, slim
from tpu_training_operator.domain.cluster_state.worker_reports import Inbox, Notes
from tpu_training_operator.domain.objects.actions import Action
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.domain.plan.planner import plan
from tpu_training_operator.kube.cluster import (
    CONFIG_MAPS,
    ENDPOINT_SLICES,
    EVENTS,
    JOBS,
    PODS,
    Cluster,
    JobKey,
    Object,
    Resource,
)
from tpu_training_operator.kube.encoding import decode
from tpu_training_operator.kube.errors import ApiError, NotFound
from tpu_training_operator.kube.replica import Replica, Version
from tpu_training_operator.runtime.cached_cluster import CachedCluster, Served
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.queues import Queues
from tpu_training_operator.runtime.reconciler import Reconciler
from tpu_training_operator.runtime.records import KnownJobs, keep_job, keep_pod

T = TypeVar("T")

KEY = JobKey("default", "digits")
# Job and pods, and the Workloads if they are of interest.
View = tuple[Object, list[Object]] | tuple[Object, list[Object], list[Object]]

# Shared by thousands of passes.
_loop = asyncio.new_event_loop()
atexit.register(_loop.close)


class Crash(BaseException):
    """The operator dies here."""


@dataclass(frozen=True)
class Trouble:
    """How effect number `at` of a pass fails. `done`: it took effect all the same."""

    at: int
    error: ApiError
    done: bool = False


@dataclass
class Requests:
    """One operator's connection during one pass. `seen`: a stale read to return. `lives_for`: it dies after this many
    effects. `order`: in which order the requests of a stage reach the cluster."""

    cluster: ModelCluster
    seen: View | None = None
    lives_for: int | None = None
    trouble: Trouble | None = None
    order: int = 0
    effects: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    failed: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.order) if self.order else None

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        self.reads.append(f"get {resource.kind}")
        if resource is JOBS:
            return copied(self.seen[0]) if self.seen else self.cluster.read_job()
        if resource.kind == "ResourceFlavor":
            return self._flavor(name)
        if resource.kind == "Workload" and self.seen is not None and len(self.seen) == 3:
            return _existing(self.seen[2], name)
        found = self.cluster.pods.get(name) if resource is PODS else self.cluster.others.get(f"{resource.kind}/{name}")
        if found is None:
            raise NotFound(404, "NotFound", f"there is no {name}")
        return self.cluster.versioned(found) if resource is PODS else copied(found)

    def _flavor(self, name: str) -> Object:
        if name not in self.cluster.flavors:
            raise NotFound(404, "NotFound", f"there is no flavor {name}")
        return copied(self.cluster.flavors[name])

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        if resource is EVENTS:
            self.cluster.event_lists += 1
            return [
                copied(event)
                for event in self.cluster.pod_events
                if event["regarding"]["uid"] == (fields or {})["regarding.uid"]
            ]
        self.reads.append(f"list {resource.kind}")
        if resource.kind == "Workload":
            return copied(self.seen[2] if self.seen and len(self.seen) == 3 else self.cluster.workloads())
        assert resource is PODS
        # As the adapter returns them.
        found = copied(self.seen[1]) if self.seen else self.cluster.current(PODS)
        return [slim(pod) for pod in found if (labels or {}).items() <= (pod["metadata"].get("labels") or {}).items()]

    async def create(self, body: Object) -> Object:
        created: Object = await self._effect(f"create {key_of(body)}", lambda: self.cluster.create(body))
        return self.cluster.versioned(created) if body["kind"] == "Pod" else created

    async def update(self, body: Object) -> Object:
        replaced: Object = await self._effect(f"replace {key_of(body)}", lambda: self.cluster.replace_other(body))
        return replaced

    async def update_status(self, body: Object) -> Object:
        if body["kind"] == "Workload":
            told: Object = await self._effect("tell Kueue", lambda: self.cluster.write_workload_status(body))
            return told
        await self._effect("write status", lambda: self.cluster.write_status(body))
        return self.cluster.read_job()

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> Object | None:
        how = {"grace": timedelta(seconds=grace_seconds)} if grace_seconds is not None else {}
        if resource.kind == "Workload":
            await self._effect(f"delete Workload/{name}", lambda: self.cluster.delete_workload(name, uid))
            return None
        deletion: Callable[[], None] = {
            JOBS: lambda: self.cluster.delete_job(uid),
            PODS: lambda: self.cluster.delete_pod(name, uid, **how),
            **dict.fromkeys(
                (CONFIG_MAPS, ENDPOINT_SLICES), lambda: self.cluster.delete_other(f"{resource.kind}/{name}", uid)
            ),
        }[resource]
        by_force = " by force" if grace_seconds == 0 else ""
        await self._effect(f"delete {resource.kind}/{name}{by_force}", deletion)
        stays = self.cluster.pods.get(name) if resource is PODS else None
        return self.cluster.versioned(stays) if stays is not None and stays["metadata"]["uid"] == uid else None

    async def _effect(self, name: str, carry_out: Callable[[], Any]) -> Any:
        for _ in range(self._random.randrange(4) if self._random else 0):
            await asyncio.sleep(0)
        if self.lives_for is not None and len(self.effects) >= self.lives_for:
            raise Crash
        trouble = self.trouble if self.trouble and self.trouble.at == len(self.effects) else None
        self.effects.append(name)
        self.failed = self.failed or trouble is not None
        if trouble and not trouble.done:
            raise trouble.error
        result = carry_out()
        if trouble:
            raise trouble.error
        return result


def _existing(found: list[Object], name: str) -> Object:
    named = next((each for each in found if each["metadata"]["name"] == name), None)
    if named is None:
        raise NotFound(404, "NotFound", f"there is no {name}")
    return copied(named)


@dataclass(frozen=True)
class Pass:
    """What a pass did. `error`: what ended it; None if it succeeded. `reads`: of jobs, pods and what it creates, from
    the API server."""

    again: timedelta | None
    effects: list[str]
    error: ApiError | Crash | None = None
    met_trouble: bool = False
    reads: tuple[str, ...] = ()


class Connection:
    """One operator's connection over all its passes; each pass makes its own requests."""

    requests: Requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self.requests, name)


class Memory:
    """What one operator process knows of the cluster. Its watches tell as many events as they are told to."""

    def __init__(self, cluster: ModelCluster) -> None:
        self._cluster = cluster
        self.served = Served(KnownJobs(), lambda: True, _is_listed)
        self._list(PODS, self.served.pods, keep_pod)
        self._list(JOBS, self.served.jobs, keep_job)
        self._told = {resource: len(journal) for resource, journal in cluster.journals.items()}

    def _list(self, resource: Resource, replica: Replica[T], keep: Callable[[Object], T | None]) -> None:
        bodies = self._cluster.current(resource)
        replica.begin_list(self._cluster.revision(resource))
        for body in bodies:
            replica.add_listed(_version(body, keep))
        replica.end_list(self._cluster.revision(resource))

    def has_heard_all(self, resource: Resource) -> bool:
        return self._told[resource] == len(self._cluster.journals[resource])

    def hear(self, jobs: int | None = None, pods: int | None = None) -> None:
        """So many more events of the two watches; None: all of them."""
        self._cluster.record()
        self._hear(JOBS, self.served.jobs, keep_job, jobs)
        self._hear(PODS, self.served.pods, keep_pod, pods)

    def _hear(
        self, resource: Resource, replica: Replica[T], keep: Callable[[Object], T | None], events: int | None
    ) -> None:
        journal, began = self._cluster.journals[resource], self._told[resource]
        self._told[resource] = len(journal) if events is None else min(len(journal), began + events)
        for is_gone, body in journal[began : self._told[resource]]:
            (replica.apply_deletion if is_gone else replica.apply_change)(_version(body, keep))


async def _is_listed() -> None:
    pass


def _version(body: Object, keep: Callable[[Object], T | None]) -> Version[T]:
    metadata = body["metadata"]
    # There is one job, which goes by one name, whatever is in its body.
    name = KEY.namespace, KEY.name if body.get("kind") == JOBS.kind else metadata["name"]
    return Version(name, metadata["uid"], int(metadata["resourceVersion"]), keep(body))


class Operator:
    """Reconciles the job of the cluster; `Pass` says how each pass went. `skew`: how far its clock is ahead."""

    def __init__(
        self, cluster: ModelCluster, inboxes: Inboxes | None = None, *, skew: timedelta = timedelta(0)
    ) -> None:
        self._cluster = cluster
        self._skew = skew
        self.inboxes = cluster.new_inboxes() if inboxes is None else inboxes
        self._start()

    def _start(self) -> None:
        cluster = self._cluster
        self._connection = Connection()
        connection = cast("Cluster", self._connection)
        self._memory = Memory(cluster)
        cached = CachedCluster(connection, lambda _: self._memory.served)
        queues = Queues(connection)
        shared = {"inboxes": self.inboxes, "reporting": cluster.reporting, "queues": queues}
        self._reconciler = Reconciler(cached, self.clock, fresh=cached.fresh, **shared)
        # For passes that hang between their reads and their effects.
        self._slow_reconciler = Reconciler(connection, self.clock, **shared)

    def clock(self) -> datetime:
        return self._cluster.now + self._skew

    def hear(self, jobs: int, pods: int) -> None:
        """So many more events of the two watches."""
        self._memory.hear(jobs, pods)

    def has_heard_of_every_write(self) -> bool:
        return self._memory.has_heard_all(JOBS)

    def work(
        self,
        *,
        seen: View | None = None,
        lives_for: int | None = None,
        trouble: Trouble | None = None,
        order: int = 0,
        has_heard_all: bool = True,
        follows: bool = False,
    ) -> Pass:
        """`follows`: directly after the pass before, whatever has happened since."""
        cluster = self._cluster
        if has_heard_all and not follows:
            self._memory.hear()
        reconciler = self._reconciler if seen is None else self._slow_reconciler
        requests = self._connection.requests = Requests(cluster, seen, lives_for, trouble, order)
        again, error = None, None
        try:
            again = _run(reconciler.reconcile(KEY, follows=follows))
        except (ApiError, Crash) as raised:
            error = raised
        if lives_for is not None and len(requests.effects) >= lives_for:
            # A crash right after the last effect is a crash before the next pass.
            error = Crash()
        if isinstance(error, Crash):
            self.inboxes = cluster.new_inboxes()
            self._start()
        return Pass(again, requests.effects, error, requests.failed, tuple(requests.reads))

    @property
    def inbox(self) -> Inbox:
        return Inbox() if self.inboxes is None else self.inboxes.of(KEY)


def seen_in(
    cluster: ModelCluster, picture: bytes, inbox: Inbox, thinned: Callable[[Object], Object] = dict
) -> Observed:
    """Returns what the planner sees in a picture of the cluster."""
    job, pods, workloads = decode(picture)
    requests = Requests(cluster, (job, pods, workloads))
    pods = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get(LABEL_JOB_NAME) == "digits"]
    queue = _loop.run_until_complete(Queues(cast("Cluster", requests)).of(job))
    return replace(Observed.of(job, list(map(thinned, pods)), inbox), queue=queue)


def look(cluster: ModelCluster) -> Plan:
    """What the planner would do now; nothing is carried out."""
    picture = cluster.picture()
    inbox = Inbox() if cluster.inboxes is None else cluster.inboxes.of(KEY)
    seen = seen_in(cluster, picture, inbox)
    # With notes, the plan also says why a gang waits.
    planned = decided(cluster, replace(seen, notes=Notes()))
    # Without pods the two views are equal.
    if cluster.pods:
        assert planned == decided(cluster, replace(seen_in(cluster, picture, inbox, slim), notes=Notes())), (
            "the same view, another plan; or a slimmed pod lacks a field that the planner reads"
        )
    return decided(cluster, seen)


def decided(cluster: ModelCluster, view: Observed, now: datetime | None = None) -> Plan:
    return plan(view, now or cluster.now, cluster.reporting)


def one_pass(cluster: ModelCluster) -> Plan:
    """The decision of one pass without trouble."""
    planned = look(cluster)
    if cluster.operator is None:
        cluster.operator = Operator(cluster, cluster.inboxes)
    result = cluster.operator.work()
    if result.error is not None:
        raise result.error
    # A refusal changes the decision.
    return replace(planned, again=result.again)


def actions(decided: Plan) -> list[Action]:
    return [action for batch in decided.batches for action in batch.actions]


def _run(work: Coroutine[Any, Any, timedelta | None]) -> timedelta | None:
    try:
        return _loop.run_until_complete(work)
    except BaseExceptionGroup as group:
        # The tasks of a stage die one by one.
        crashes, others = group.split(Crash)
        if others is not None:
            raise
        raise Crash from crashes
