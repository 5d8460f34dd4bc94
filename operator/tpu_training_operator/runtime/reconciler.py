"""Makes one pass over one job: reads, plans, acts, and writes the status once.

The order matters. Actions come before the status, so that a status never claims what was not done. The attempt is
raised in a pass without actions, so that nothing is done that the status does not show. A pass may read from memory; if
its plan needs fresh reads, it reads again and decides again.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, find
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.cluster_state.multikueue import is_managed_elsewhere
from tpu_training_operator.domain.cluster_state.observed import Observed, WorkerPod, parse_time
from tpu_training_operator.domain.cluster_state.ownership import controller, is_ours
from tpu_training_operator.domain.cluster_state.worker_reports import Notes, Reporting
from tpu_training_operator.domain.cluster_state.workload import Queue
from tpu_training_operator.domain.job.naming import gang_selector
from tpu_training_operator.domain.objects.actions import AT_ONCE, Event
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy
from tpu_training_operator.domain.plan.blocked import show_obstacle, show_retry, undo_retry
from tpu_training_operator.domain.plan.parse_cache import read_status
from tpu_training_operator.domain.plan.plan import Freshness, Plan
from tpu_training_operator.domain.plan.planner import plan
from tpu_training_operator.kube.cluster import JOBS, NAMESPACES, PODS, Cluster, ClusterReader, JobKey, Object
from tpu_training_operator.kube.errors import ApiError, Conflict, NotFound
from tpu_training_operator.runtime.cached_cluster import Fresh
from tpu_training_operator.runtime.events import EventSender, send_events
from tpu_training_operator.runtime.execution import Memory, PlanExecution, Refused, Unconfirmed
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.metrics.transitions import unready_since
from tpu_training_operator.runtime.name_servers import NameServers
from tpu_training_operator.runtime.queues import Queues

log = logging.getLogger(__name__)

_FAILURES_BEFORE_REPORT = 3
# Three seconds of retries. A job or a pod that has only changed since it was read is read again much earlier.
_CONFLICTS_BEFORE_REPORT = 6
# How long to wait for events about further pods while a gang starts or stops.
_LEAST_SETTLE_SECONDS = 0.25
_MOST_SETTLE_SECONDS = 5.0
_SETTLE_SECONDS_PER_POD = 0.004


@dataclass(frozen=True)
class _Look:
    """What a pass has read, and its plan. `stored`: the status as it was read; `before`: without the failures of
    passes. `pods`: as they were read."""

    job: Object
    observed: Observed
    stored: Status
    before: Status
    decision: Plan
    queue: Queue | None
    pods: Sequence[Object]


class Reconciler:
    """`fresh` reads from the API server what `cluster` may read from memory; None if `cluster` has no memory. `events`
    sends events outside of passes; None: each pass sends its own. `inboxes`, `reporting`: what workers report, and
    where; both or neither. `network_policy` keeps other pods from a job's workers. Jobs with more than `max_hosts`
    hosts are never started. `package_index`: whether workers may install packages from an index. `queues` reads what
    Kueue has decided; None: labels that name a queue are ignored. `name_servers`: what resolves the workers' names;
    None: anything."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], datetime],
        *,
        fresh: ClusterReader | None = None,
        events: EventSender | None = None,
        inboxes: Inboxes | None = None,
        reporting: Reporting | None = None,
        network_policy: WorkerNetworkPolicy | None = None,
        metrics: Metrics | None = None,
        max_hosts: int = MAX_HOSTS,
        package_index: bool = True,
        queues: Queues | None = None,
        name_servers: NameServers | None = None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._fresh = fresh
        self._events = events
        self._inboxes = inboxes
        self._reporting = reporting
        self._network_policy = network_policy
        self._metrics = metrics
        self._max_hosts = max_hosts
        self._package_index = package_index
        self._queues = queues
        self._name_servers = name_servers
        self._memories: dict[JobKey, Memory] = {}

    def wrote(self, key: JobKey, version: str) -> bool:
        """Returns whether this resourceVersion of the job comes from the last status that was written here."""
        return key in self._memories and self._memories[key].version == version

    def is_restarting(self, key: JobKey) -> bool:
        """Returns whether the job's gang has failed and does not run again yet, so that hosts stand idle."""
        return key in self._memories and self._memories[key].is_restarting

    def settle_seconds(self, key: JobKey) -> float:
        """Returns how long to wait for more events about the job: every pass reads all of its pods, and the pods of a
        large gang start one by one."""
        pods = self._memories[key].pods if key in self._memories else 0
        return min(max(_LEAST_SETTLE_SECONDS, pods * _SETTLE_SECONDS_PER_POD), _MOST_SETTLE_SECONDS)

    async def reconcile(self, key: JobKey, *, follows: bool = False) -> timedelta | None:
        """Brings the job one step closer to its spec. `follows`: directly after the last pass over it.

        Returns the time after which to requeue the job even without a hint; None: never. Raises ApiError if the pass
        should be retried: Conflict if something has changed since it was read, Unavailable if the cluster could not
        answer. If passes keep failing, the job's status says so, or an event if the status cannot be written.
        """
        memory = self._memories.setdefault(key, Memory())
        try:
            again = await self._pass(key, memory, follows=follows)
        except Exception as error:
            memory.failed_passes += 1
            # A conflict is no failure unless it repeats: admission webhooks also answer 409.
            enough = _CONFLICTS_BEFORE_REPORT if isinstance(error, Conflict) else _FAILURES_BEFORE_REPORT
            if memory.failed_passes >= enough:
                await self._report_failure(key, memory, error)
            raise
        memory.failed_passes = 0
        memory.sent_retrying = False
        return again

    async def _pass(self, key: JobKey, memory: Memory, *, follows: bool) -> timedelta | None:
        # 1. Read and decide, again with fresh reads if the plan needs them.
        try:
            look = await self._look(key, memory, self._cluster, self._cluster)
            if self._fresh is not None:
                look = await self._refresh(look, key, memory, self._fresh, follows=follows)
        except NotFound:
            self._forget(key)
            return None
        look = await self._look_into_failure(look, key)
        job, observed, stored, before, decision = look.job, look.observed, look.stored, look.before, look.decision

        # 2. Act. If the cluster refuses an action for good, the job is blocked.
        execution = PlanExecution(self._cluster, self._clock, self._inboxes, key, job, memory, self._name_servers)
        try:
            if not await execution.carry_out(decision):
                return AT_ONCE
        except Unconfirmed as unconfirmed:
            log.info(
                "an action was refused, perhaps only for a moment: %s", unconfirmed.__cause__, extra={"job": str(key)}
            )
            return unconfirmed.wait
        except Refused as refused:
            decision = show_obstacle(observed, refused.obstacle, self._clock())
            if refused.obstacle.reason == Reason.NOT_PERMITTED and await self._is_namespace_going(key):
                decision = self._decide(replace(observed, is_namespace_going=True))

        # 3. Write the status, if it changed, and send the events of the decision.
        after = decision.status or before
        if after != stored:
            await self._write(after, stored, job, key, memory)
            memory.began = memory.version if (before.attempt, after.attempt, memory.pods) == (0, 1, 0) else ""
            if after != before:
                if self._events is None:
                    await send_events(self._cluster, decision.events, job, self._clock())
                else:
                    self._events.send(decision.events, job, self._clock())
            # A new report alone needs no line in the log.
            level = logging.DEBUG if after.conditions == stored.conditions else logging.INFO
            context = {"job": str(key), "uid": job["metadata"]["uid"], "attempt": after.attempt}
            log.log(level, "job is %s", _summary(stored, after), extra=context)
        memory.is_restarting = after.state is State.RESTARTING
        if self._metrics and not is_managed_elsewhere(job):
            now, created = self._clock(), job["metadata"].get("creationTimestamp")
            unready = now - unready_since(after, parse_time(created) if created else now)
            self._metrics.job_seen(key, after.state, max(0.0, unready.total_seconds()))

        # 4. A finished job no longer needs reports and notes.
        if after.completion_time is not None:
            self._forget_reports(key)
            memory.notes = Notes()
        return decision.again

    async def _look(
        self, key: JobKey, memory: Memory, jobs: ClusterReader, pods_of: ClusterReader, earlier: "_Look | None" = None
    ) -> "_Look":
        """Reads and decides. Raises NotFound if there is no such job.

        `earlier`: a look at older reads. Its plan is kept if nothing has changed since, and its queue in any case.
        """
        # First the job: pods that were read before it could lack the workers of its latest attempt. Then its Workload,
        # before the pods: its quota must not be given back while there are workers.
        job = await jobs.get(JOBS, key.namespace, key.name)
        queue = earlier.queue if earlier is not None else None
        if queue is None and self._queues is not None:
            queue = await self._queues.of(job)
        pods = await pods_of.list(PODS, key.namespace, gang_selector(key.name))
        memory.pods = len(pods)
        if earlier is not None and _version(job) == _version(earlier.job) and _by_uid(pods) == _by_uid(earlier.pods):
            return earlier

        # The planner ignores that earlier passes have failed.
        stored = read_status(job.get("status"))
        before = undo_retry(stored, job)
        body = job if before is stored else {**job, "status": before.as_json()}
        observed = replace(self._with_inbox(Observed.of(body, pods), key), notes=memory.notes, queue=queue)
        return _Look(job, observed, stored, before, self._decide(observed), queue, pods)

    def _decide(self, observed: Observed) -> Plan:
        return plan(
            observed,
            self._clock(),
            self._reporting,
            network_policy=self._network_policy,
            max_hosts=self._max_hosts,
            package_index=self._package_index,
        )

    async def _refresh(
        self, look: "_Look", key: JobKey, memory: Memory, fresh: ClusterReader, *, follows: bool
    ) -> "_Look":
        """Returns a look that is as fresh as its plan needs. Raises NotFound if there is no such job."""
        if look.decision.freshness is Freshness.FRESH_PODS:
            if isinstance(fresh, Fresh) and fresh.is_as_created(look.job):
                # It has never had workers. And if it has changed since, its status will not be written.
                return look
            # With fresh pods, the plan may be another one, which may need more.
            look = await self._look(key, memory, self._cluster, fresh, look)
        if look.decision.freshness is not Freshness.FRESH_ALL:
            return look
        # If the job has not changed since its first attempt began here, when it had no pods, only workers of that
        # attempt can exist, with the names of those that are about to be created. What the write that began it has
        # just answered is a read of the job.
        began_here = memory.began == _version(look.job) and memory.pods == 0
        if began_here and (follows or _version(await fresh.get(JOBS, key.namespace, key.name)) == memory.began):
            return look
        return await self._look(key, memory, fresh, fresh, look)

    async def _look_into_failure(self, look: "_Look", key: JobKey) -> "_Look":
        """Returns the look, planned again with more information if it shows a new failure. A worker that was not listed
        may exist after all, or its last version may show why it failed. And nothing fails in a namespace that is being
        deleted."""
        failure = look.decision.status.last_failure if look.decision.status else None
        is_news = failure is not None and failure != look.before.last_failure
        is_gone = is_news and failure is not None and failure.reason == FailureReason.POD_DELETED
        ready = find(look.before.conditions, ConditionType.READY)
        was_going = ready is not None and ready.reason == Reason.BEING_DELETED
        # The deletion of a namespace begins with its pods: if none of them is being deleted, neither is the namespace.
        if not was_going and not is_gone and not (is_news and any(pod.is_terminating for pod in look.observed.pods)):
            return look
        trace = await self._find_worker(key, look.job, failure.pod) if is_gone and failure else None
        observed = replace(look.observed, trace=trace, is_namespace_going=await self._is_namespace_going(key))
        return replace(look, observed=observed, decision=self._decide(observed))

    async def _find_worker(self, key: JobKey, job: Object, name: str) -> WorkerPod | None:
        """Returns the job's worker as it is, or as it was at its end; None if it is not the job's own."""
        try:
            body = await (self._fresh or self._cluster).get(PODS, key.namespace, name)
            # It may have lost its label or its owner.
            return WorkerPod(body) if is_ours(body, job) or not controller(body) else None
        except NotFound:
            end = self._fresh.end_of(key.namespace, name) if isinstance(self._fresh, Fresh) else None
            return WorkerPod(end) if end is not None and is_ours(end, job) else None

    async def _is_namespace_going(self, key: JobKey) -> bool:
        """Returns whether the namespace is being deleted; False if it cannot be read."""
        try:
            body = await self._cluster.get(NAMESPACES, "", key.namespace)
        except ApiError:
            return False
        return "deletionTimestamp" in body["metadata"]

    def _with_inbox(self, observed: Observed, key: JobKey) -> Observed:
        """Adds the reports of the job's own workers. Those of a deleted job of the same name are dropped."""
        if self._inboxes is None:
            return observed
        observed = replace(observed, inbox=self._inboxes.of(key))
        if observed.inbox.report is None or observed.report is not None:
            return observed
        self._inboxes.forget(key)
        return replace(observed, inbox=self._inboxes.of(key))

    def _forget(self, key: JobKey) -> None:
        """Forgets a job that is gone."""
        self._memories.pop(key, None)
        self._forget_reports(key)
        if self._metrics:
            self._metrics.job_gone(key)

    def _forget_reports(self, key: JobKey) -> None:
        if self._inboxes is not None:
            self._inboxes.forget(key)

    async def _write(self, after: Status, before: Status, job: Object, key: JobKey, memory: Memory) -> None:
        written = await self._cluster.update_status({**job, "status": after.as_json()})
        memory.version = written["metadata"]["resourceVersion"]
        memory.notes = replace(memory.notes, written=self._clock())
        if self._metrics:
            self._metrics.status_written(key, before, after)

    async def _report_failure(self, key: JobKey, memory: Memory, error: Exception) -> None:
        """Writes into the job's status why its passes fail, and sends one event about it."""
        try:
            job = await self._cluster.get(JOBS, key.namespace, key.name)
        except ApiError as failure:
            log.warning("the job's status cannot be read to show why passes fail: %s", failure, extra={"job": str(key)})
            return
        is_news, message = not memory.sent_retrying, _explain(error)
        try:
            before = Status.read(job.get("status"))
            is_news = is_news and undo_retry(before, job) is before
            # The status of a finished job shows how it ended.
            if before.completion_time is None:
                after = show_retry(Observed.of(job, []), message, self._clock())
                if after != before:
                    await self._write(after, before, job, key, memory)
        except ApiError as failure:
            log.warning(
                "the job's status cannot be written to show why passes fail: %s", failure, extra={"job": str(key)}
            )
        event = Event(EventReason.RETRYING, message, warning=True)
        if is_news and await send_events(self._cluster, (event,), job, self._clock()):
            memory.sent_retrying = True


def _version(job: Object) -> str:
    return str(job["metadata"]["resourceVersion"])


def _by_uid(pods: Sequence[Object]) -> dict[str, Object]:
    """Returns the pods without their versions, which change no plan and are not in the operator's memory."""
    return {pod["metadata"]["uid"]: {**pod, "metadata": {**pod["metadata"], "resourceVersion": None}} for pod in pods}


def _summary(before: Status, after: Status) -> str:
    """Returns state and reason, and a new failure's class and exit code. It has no messages: they end with the log of
    the user's program, which is for those who may read the job, not for everyone who may read the operator's log."""
    ready = find(after.conditions, ConditionType.READY)
    text = f"{after.state} ({ready.reason})" if ready else str(after.state)
    failure = after.last_failure
    if failure is None or failure == before.last_failure:
        return text
    code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
    return f"{text}: {failure.pod} failed with {failure.failure_class} ({failure.reason}{code})"


def _explain(error: Exception) -> str:
    """Explains the error to the job's owner, who can only forward it to an administrator."""
    match error:
        case ApiError(status=0):
            return f"the API server cannot be reached: {error}; retrying"
        case ApiError(status=status):
            return f"the API server answered {status}: {error}; retrying"
        case _:
            return f"the operator failed with {type(error).__name__}: {error}; its log has the details; retrying"
