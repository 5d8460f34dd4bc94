"""One pass over one job: read, plan, act, write the status once.

The order matters. Actions come before the status, so that a status never claims what was not done. An attempt number is
raised in a pass without actions, so that nothing is done that the status does not know. What a pass reads may be a bit
old; if it decides what weighs, it reads afresh and decides again.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, find
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.failures import FailureReason
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.cluster_state.observed import Observed, WorkerPod, parse_time
from tpu_training_operator.domain.cluster_state.ownership import controller, is_ours
from tpu_training_operator.domain.cluster_state.worker_reports import Notes, Reporting
from tpu_training_operator.domain.cluster_state.workload import Queue, is_of_others, manager_of
from tpu_training_operator.domain.job.naming import gang_selector
from tpu_training_operator.domain.objects.actions import AT_ONCE, Event
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy
from tpu_training_operator.domain.plan.blocked import show_obstacle, show_retry, undo_retry
from tpu_training_operator.domain.plan.freshness import Freshness
from tpu_training_operator.domain.plan.parse_cache import ParseCache
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.domain.plan.planner import plan
from tpu_training_operator.kube.cluster import JOBS, NAMESPACES, PODS, Cluster, ClusterReader, JobKey, Object
from tpu_training_operator.kube.errors import ApiError, Conflict, NotFound
from tpu_training_operator.runtime.cached_cluster import Fresh
from tpu_training_operator.runtime.events import EventSender, send_events
from tpu_training_operator.runtime.execution import Memory, PlanExecution, Refused, Unconfirmed
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.metrics.transitions import unready_since
from tpu_training_operator.runtime.queues import Queues

log = logging.getLogger(__name__)

_FAILURES_BEFORE_TOLD = 3
# Three seconds of retries. A job or a pod that merely changed since it was read is read again long before.
_CONFLICTS_BEFORE_TOLD = 6
# While a gang starts or stops, between its first and its last pod.
_LEAST_SETTLE_SECONDS = 0.25
_MOST_SETTLE_SECONDS = 5.0
_SETTLE_SECONDS_PER_POD = 0.004


@dataclass(frozen=True)
class _Look:
    """`stored`: the status as it was read; `before`: as it was before passes failed. `pods`: as they were read."""

    job: Object
    observed: Observed
    stored: Status
    before: Status
    decided: Plan
    queue: Queue | None
    pods: Sequence[Object]


class Reconciler:
    """`inboxes` and `reporting`: what workers report, and where to; both or neither. `network_policy`:
    keeps other pods from a job's workers. Jobs with more than `max_hosts` hosts are never started. `fixed_node_pools`:
    nothing creates node pools in this cluster. `fresh` reads what
    `cluster` may know only from memory; None if `cluster` has none. `events` sends events beside the passes; None: a
    pass waits for its own. `queues`: what Kueue says; None: labels that name a queue mean nothing."""

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
        fixed_node_pools: bool = False,
        queues: Queues | None = None,
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
        self._fixed_node_pools = fixed_node_pools
        self._queues = queues
        self._memories: dict[JobKey, Memory] = {}
        self._cache = ParseCache()

    def wrote(self, key: JobKey, version: str) -> bool:
        """Whether this resourceVersion of the job comes from the status that was written here last."""
        return key in self._memories and self._memories[key].version == version

    def is_restarting(self, key: JobKey) -> bool:
        """Whether its gang failed and does not run again yet: hosts stand idle until it does."""
        return key in self._memories and self._memories[key].is_restarting

    def settle_seconds(self, key: JobKey) -> float:
        """How long to wait for more events about the job: every pass reads all of its pods, and the pods of a large
        gang start one by one."""
        pods = self._memories[key].pods if key in self._memories else 0
        return min(max(_LEAST_SETTLE_SECONDS, pods * _SETTLE_SECONDS_PER_POD), _MOST_SETTLE_SECONDS)

    async def reconcile(self, key: JobKey) -> timedelta | None:
        """Bring the job one step closer to its spec.

        Returns the time after which to requeue the job even if nothing is heard; None: never. Raises ApiError if the
        pass should be retried: Conflict when something changed since it was read, Unavailable when the cluster could
        not answer. When passes keep failing, the job's status says so, or an event if the status cannot be written.
        """
        memory = self._memories.setdefault(key, Memory())
        try:
            again = await self._pass(key, memory)
        except Exception as error:
            memory.failed_passes += 1
            # A change since the job was read is not a failure unless it never ends: admission webhooks also answer 409.
            enough = _CONFLICTS_BEFORE_TOLD if isinstance(error, Conflict) else _FAILURES_BEFORE_TOLD
            if memory.failed_passes >= enough:
                await self._tell_failure(key, memory, error)
            raise
        memory.failed_passes = 0
        memory.sent_retrying = False
        return again

    async def _pass(self, key: JobKey, memory: Memory) -> timedelta | None:
        # 1. Read and decide; afresh, if the decision weighs.
        try:
            seen = await self._look(key, memory, self._cluster, self._cluster)
            if self._fresh is not None:
                seen = await self._fresh_enough(seen, key, memory, self._fresh)
        except NotFound:
            self._forget(key)
            return None
        seen = await self._explained(seen, key)
        job, observed, stored, before, decided = seen.job, seen.observed, seen.stored, seen.before, seen.decided

        # 2. Act. If the cluster refuses an action for good, the job is blocked.
        execution = PlanExecution(self._cluster, self._clock, self._inboxes, key, job, memory, self._fixed_node_pools)
        try:
            if not await execution.carry_out(decided):
                return AT_ONCE
        except Unconfirmed as unconfirmed:
            log.info("refused, to be confirmed: %s", unconfirmed.__cause__, extra={"job": str(key)})
            return unconfirmed.wait
        except Refused as refused:
            decided = show_obstacle(observed, refused.obstacle, self._clock())
            if refused.obstacle.reason == Reason.NOT_PERMITTED and await self._is_namespace_going(key):
                decided = self._planned(replace(observed, is_namespace_going=True))

        # 3. Write the status, if it changed, and send the events of the decision.
        after = decided.status or before
        if after != stored:
            await self._write(after, stored, job, key, memory)
            memory.began = memory.version if (before.attempt, after.attempt, memory.pods) == (0, 1, 0) else ""
            if after != before:
                await self._tell(decided.events, job)
            # A new report alone is not worth a line.
            level = logging.DEBUG if after.conditions == stored.conditions else logging.INFO
            context = {"job": str(key), "uid": job["metadata"]["uid"], "attempt": after.attempt}
            log.log(level, "job is %s", _summary(stored, after), extra=context)
        memory.is_restarting = after.state is State.RESTARTING
        if self._metrics and not is_of_others(job):
            self._metrics.job_seen(key, after.state, self._unready_seconds(after, job))

        # 4. A finished job no longer needs reports and notes.
        if after.completion_time is not None:
            self._forget_reports(key)
            memory.notes = Notes()
        return decided.again

    async def _look(
        self, key: JobKey, memory: Memory, jobs: ClusterReader, pods_of: ClusterReader, earlier: "_Look | None" = None
    ) -> "_Look":
        """Read and decide. Raises NotFound if there is no such job.

        `earlier`: a look at older reads. Its plan stands if nothing has changed since, and what it has read of the
        queue stands in any case.
        """
        # The job first: pods read before the job could lack the workers of its latest attempt. And before the pods its
        # Workload: its quota must not be given back while there are workers.
        job = await jobs.get(JOBS, key.namespace, key.name)
        queue = earlier.queue if earlier is not None else None
        if queue is None and self._queues is not None:
            queue = await self._queues.of(job)
        pods = await pods_of.list(PODS, key.namespace, gang_selector(key.name))
        memory.pods = len(pods)
        if earlier is not None and _version(job) == _version(earlier.job) and _by_uid(pods) == _by_uid(earlier.pods):
            return earlier

        # As if no earlier pass had failed.
        stored = self._cache.status(job.get("status"))
        # The status of a job that others run is theirs.
        before = stored if manager_of(job) else undo_retry(stored)
        seen = job if before is stored else {**job, "status": before.as_json()}
        observed = replace(self._with_inbox(Observed.of(seen, pods), key), notes=memory.notes, queue=queue)
        return _Look(job, observed, stored, before, self._planned(observed), queue, pods)

    def _planned(self, observed: Observed) -> Plan:
        return plan(
            observed,
            self._clock(),
            self._reporting,
            network_policy=self._network_policy,
            max_hosts=self._max_hosts,
            cache=self._cache,
        )

    async def _fresh_enough(self, seen: "_Look", key: JobKey, memory: Memory, fresh: ClusterReader) -> "_Look":
        """A look that is as fresh as its plan needs. Raises NotFound if there is no such job."""
        if seen.decided.freshness is Freshness.FRESH_PODS:
            # With the present pods, the plan may be another one, which may need more.
            seen = await self._look(key, memory, self._cluster, fresh, seen)
        if seen.decided.freshness is not Freshness.FRESH_ALL:
            return seen
        if memory.began == seen.job["metadata"]["resourceVersion"] and memory.pods == 0:
            now = await fresh.get(JOBS, key.namespace, key.name)
            if now["metadata"]["resourceVersion"] == memory.began:
                # Nothing has touched the job since its first attempt began here, when it had no pods. Workers can only
                # come of that attempt, with the names of those that are about to be created.
                return seen
        return await self._look(key, memory, fresh, fresh, seen)

    async def _explained(self, seen: "_Look", key: JobKey) -> "_Look":
        """The look; decided again with more, if it has found a new failure. A worker that is not listed may be there
        all the time, or has told before it went why. And nothing fails in a namespace that is being deleted."""
        failure = seen.decided.status.last_failure if seen.decided.status else None
        is_news = failure is not None and failure != seen.before.last_failure
        is_gone = is_news and failure is not None and failure.reason == FailureReason.POD_DELETED
        ready = find(seen.before.conditions, ConditionType.READY)
        was_going = ready is not None and ready.reason == Reason.BEING_DELETED
        # A namespace's deletion begins with its pods': a worker that fails while none of them goes needs no look.
        if not was_going and not is_gone and not (is_news and any(pod.is_terminating for pod in seen.observed.pods)):
            return seen
        trace = await self._trace(key, seen.job, failure.pod) if is_gone and failure else None
        observed = replace(seen.observed, trace=trace, is_namespace_going=await self._is_namespace_going(key))
        return replace(seen, observed=observed, decided=self._planned(observed))

    async def _trace(self, key: JobKey, job: Object, name: str) -> WorkerPod | None:
        """The worker as it is, or as it was at its end. Only one that was the job's own."""
        try:
            found = await (self._fresh or self._cluster).get(PODS, key.namespace, name)
            # Without its label or its owner, it is still known by its name.
            return WorkerPod(found) if is_ours(found, job) or not controller(found) else None
        except NotFound:
            end = self._fresh.end_of(key.namespace, name) if isinstance(self._fresh, Fresh) else None
            return WorkerPod(end) if end is not None and is_ours(end, job) else None

    async def _is_namespace_going(self, key: JobKey) -> bool:
        """Whether the namespace is being deleted; False if that cannot be read."""
        try:
            found = await self._cluster.get(NAMESPACES, "", key.namespace)
        except ApiError:
            return False
        return "deletionTimestamp" in found["metadata"]

    async def _tell(self, events: Sequence[Event], job: Object) -> None:
        if self._events is None:
            await send_events(self._cluster, events, job, self._clock())
        else:
            self._events.send(events, job, self._clock())

    def _with_inbox(self, observed: Observed, key: JobKey) -> Observed:
        """With the reports of the job's own workers. Those of a deleted job of the same name are dropped."""
        if self._inboxes is None:
            return observed
        observed = replace(observed, inbox=self._inboxes.of(key))
        if observed.inbox.report is None or observed.report is not None:
            return observed
        self._inboxes.forget(key)
        return replace(observed, inbox=self._inboxes.of(key))

    def _unready_seconds(self, status: Status, job: Object) -> float:
        now, created = self._clock(), job["metadata"].get("creationTimestamp")
        since = unready_since(status, parse_time(created) if created else now)
        return max(0.0, (now - since).total_seconds())

    def _forget(self, key: JobKey) -> None:
        """The job is gone."""
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
            self._metrics.status_written(before, after)

    async def _tell_failure(self, key: JobKey, memory: Memory, error: Exception) -> None:
        """Say in the job's status why its passes fail, and once in an event."""
        try:
            job = await self._cluster.get(JOBS, key.namespace, key.name)
        except ApiError as failure:
            log.warning("the job's owner cannot be told why passes fail: %s", failure, extra={"job": str(key)})
            return
        is_news, message = not memory.sent_retrying, _explanation(error)
        try:
            before = Status.read(job.get("status"))
            is_news = is_news and undo_retry(before) is before
            # The status of a finished job says how it ended.
            if before.completion_time is None and not manager_of(job):
                after = show_retry(Observed.of(job, []), message, self._clock())
                if after != before:
                    await self._write(after, before, job, key, memory)
        except ApiError as failure:
            log.warning("the status cannot say why passes fail: %s", failure, extra={"job": str(key)})
        event = Event(EventReason.RETRYING, message, warning=True)
        if is_news and await send_events(self._cluster, (event,), job, self._clock()):
            memory.sent_retrying = True


def _version(job: Object) -> str:
    return str(job["metadata"]["resourceVersion"])


def _by_uid(pods: Sequence[Object]) -> dict[str, Object]:
    """Returns the pods without their versions, which change no plan and are not in the operator's memory."""
    return {pod["metadata"]["uid"]: {**pod, "metadata": {**pod["metadata"], "resourceVersion": None}} for pod in pods}


def _summary(before: Status, after: Status) -> str:
    """State and reason, and a new failure's class and exit code. No messages: they end with the log of the user's
    program, which is for those who may read the job, not for everyone who may read the operator's log."""
    ready = find(after.conditions, ConditionType.READY)
    text = f"{after.state} ({ready.reason})" if ready else str(after.state)
    failure = after.last_failure
    if failure is None or failure == before.last_failure:
        return text
    code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
    return f"{text}: {failure.pod} failed with {failure.failure_class} ({failure.reason}{code})"


def _explanation(error: Exception) -> str:
    """For the job's owner, who can only pass it on to an administrator."""
    match error:
        case ApiError(status=0):
            return f"the API server cannot be reached: {error}; retrying"
        case ApiError(status=status):
            return f"the API server answered {status}: {error}; retrying"
        case _:
            return f"the operator failed with {type(error).__name__}: {error}; its log has the details; retrying"
