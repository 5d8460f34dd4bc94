"""One pass over one job: read the cluster, plan, act, write the status once.

The order matters. Actions come before the status, so the status never claims what was not done. A pass that raises the
attempt has no actions, so nothing is done that the status does not know.
"""

import logging
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import replace
from datetime import datetime, timedelta

from pydantic import ValidationError

from tpu_training_operator.api.conditions import ConditionType, EventReason, Reason, find
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.actions import (
    AT_ONCE,
    Action,
    AskForStacks,
    Create,
    DeleteConfigMap,
    DeleteJob,
    DeletePod,
    Event,
    LookAtEvents,
    Plan,
)
from tpu_training_operator.domain.lifecycle.blocked import Obstacle, blocked, name_taken, recovered, retrying
from tpu_training_operator.domain.lifecycle.plan import plan
from tpu_training_operator.domain.naming import gang_selector
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy
from tpu_training_operator.domain.observed import Observed
from tpu_training_operator.domain.ownership import is_ours
from tpu_training_operator.domain.report import Reporting
from tpu_training_operator.kube.cluster import CONFIG_MAPS, JOBS, PODS, Cluster, JobKey, Object, Resource, resource_of
from tpu_training_operator.kube.errors import AlreadyExists, ApiError, Conflict, Forbidden, Invalid, NotFound
from tpu_training_operator.runtime.events import event_body
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.notebook import Notebook
from tpu_training_operator.runtime.stages import Refused, carry_out

log = logging.getLogger(__name__)

# Longer than replacing an API server takes, or a new role takes to reach all API servers.
_DOUBT = timedelta(seconds=10)
_FAILURES_BEFORE_TOLD = 3
# Three seconds of retries. An object that simply changed since it was read needs fewer.
_CONFLICTS_BEFORE_TOLD = 6
# Five seconds for the largest gang, whose restart takes minutes.
_SECONDS_PER_POD = 0.001


class _Unconfirmed(Exception):
    """An optional object was refused; after `wait` it is known whether the refusal lasts."""

    def __init__(self, wait: timedelta) -> None:
        super().__init__()
        self.wait = wait


class Reconciler:
    """`inboxes` and `reporting`: what workers report, and where; both or neither. `network_policy`: keeps other
    pods from a job's workers. `side_by_side`: how many requests of one stage may be under way at once.
    `max_hosts`: no larger job is begun."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], datetime],
        *,
        inboxes: Inboxes | None = None,
        reporting: Reporting | None = None,
        network_policy: WorkerNetworkPolicy | None = None,
        metrics: Metrics | None = None,
        side_by_side: int = 32,
        max_hosts: int = MAX_HOSTS,
    ) -> None:
        self._cluster = cluster
        self._notebook = Notebook(cluster, clock)
        self._clock = clock
        self._inboxes = inboxes
        self._reporting = reporting
        self._network_policy = network_policy
        # Jobs without an object that may be missing.
        self._told_optional: set[JobKey] = set()
        self._metrics = metrics
        self._side_by_side = side_by_side
        self._max_hosts = max_hosts
        self._written: dict[JobKey, str] = {}
        # Passes that failed in a row.
        self._failures: dict[JobKey, int] = {}
        # Pods of the job, when they were last listed.
        self._pods: dict[JobKey, int] = {}
        # Jobs that already have an event about failing passes.
        self._told_failing: set[JobKey] = set()
        # Since when objects of a kind are refused; the refusal may pass.
        self._doubted: dict[JobKey, dict[str, datetime]] = {}
        # The uids that the last pass wanted to delete and the cluster did not find.
        self._not_found: dict[JobKey, set[str]] = {}

    def wrote(self, key: JobKey, version: str) -> bool:
        """Whether this resourceVersion of the job comes from the last status write here."""
        return self._written.get(key) == version

    def settle_seconds(self, key: JobKey) -> float:
        """How long to wait for further hints about the job: every pass reads all of its pods, and the pods of a large
        gang start one by one."""
        return self._pods.get(key, 0) * _SECONDS_PER_POD

    async def reconcile(self, key: JobKey) -> timedelta | None:
        """Bring the job one step closer to its spec.

        Returns when to reconcile again even if the cluster reports no change. Raises ApiError if the pass should be
        retried: Conflict if something changed since it was read, Unavailable if the cluster could not answer. The job's
        status tells when passes keep failing, or an event if the status cannot be written.
        """
        try:
            again = await self._pass(key)
        except Exception as error:
            await self._failed(key, error)
            raise
        self._failures.pop(key, None)
        self._told_failing.discard(key)
        return again

    async def _pass(self, key: JobKey) -> timedelta | None:
        try:
            job = await self._cluster.get(JOBS, key.namespace, key.name)
        except NotFound:
            self._forget(key)
            self._notebook.forget(key)
            for told in (self._told_optional, self._told_failing):
                told.discard(key)
            for known in (self._written, self._failures, self._doubted, self._pods, self._not_found):
                known.pop(key, None)
            if self._metrics:
                self._metrics.job_gone(key)
            return None
        # Pods are read after the job: read before it, they could lack workers of an attempt that the job left behind.
        pods = await self._cluster.list(PODS, key.namespace, gang_selector(key.name))
        self._pods[key] = len(pods)
        before = Status.read(job.get("status"))
        # The planner decides as if no earlier pass had failed.
        known_good = recovered(before)
        seen = job if known_good is before else {**job, "status": known_good.as_json()}
        observed = replace(self._with_inbox(Observed.of(seen, pods), key), notes=self._notebook.of(key))
        decided = plan(observed, self._clock(), self._reporting, max_hosts=self._max_hosts)
        if self._network_policy is not None:
            decided = self._network_policy.added_to(decided, job)
        try:
            if not await self._carry_out(decided, job, key):
                return AT_ONCE
        except _Unconfirmed as refusal:
            return refusal.wait
        except Refused as refused:
            if wait := self._doubt(refused, key):
                return wait
            decided = blocked(observed, refused.obstacle, self._clock())
        else:
            self._doubted.pop(key, None)
        status = await self._write_status(decided, known_good, before, job, key)
        if self._metrics:
            self._metrics.job_seen(key, status.state)
        if status.completion_time is not None:
            self._forget(key)
            self._notebook.forget(key)
        return decided.again

    def _doubt(self, refused: Refused, key: JobKey) -> timedelta | None:
        """How long to wait until the refusal counts; None if it counts now. An API server that is being replaced may
        refuse what it accepts a moment later."""
        if refused.sure:
            return None
        now = self._clock()
        wait = self._doubted.setdefault(key, {}).setdefault(refused.kind, now) + _DOUBT - now
        # A clock that was set back must not extend the wait.
        if not AT_ONCE < wait <= _DOUBT:
            return None
        log.info("refused, to be confirmed: %s", refused, extra={"job": str(key)})
        return wait

    async def _failed(self, key: JobKey, error: Exception) -> None:
        """Counts a failed pass. After a few in a row, the job's status says why."""
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        # A conflict is normal unless it repeats: an admission webhook may answer 409, too.
        if failures < (_CONFLICTS_BEFORE_TOLD if isinstance(error, Conflict) else _FAILURES_BEFORE_TOLD):
            return
        try:
            job = await self._cluster.get(JOBS, key.namespace, key.name)
        except ApiError as failure:
            log.warning("the job cannot be read to report the error: %s", failure, extra={"job": str(key)})
            return
        is_news = key not in self._told_failing
        try:
            before = Status.read(job.get("status"))
            is_news = is_news and recovered(before) is before
            # The status of a finished job stays as it ended.
            if before.completion_time is None:
                after = retrying(Observed.of(job, []), _words(error), self._clock())
                if after != before:
                    await self._write(after, before, job, key, ())
        except (ApiError, ValidationError) as failure:
            log.warning("the error cannot be written to the job's status: %s", failure, extra={"job": str(key)})
        event = Event(EventReason.RETRYING, _words(error), warning=True)
        if is_news and await self._send((event,), job, key):
            self._told_failing.add(key)

    def _with_inbox(self, observed: Observed, key: JobKey) -> Observed:
        """With the reports of the job's own workers. Reports of a deleted job of the same name are dropped."""
        if self._inboxes is None:
            return observed
        observed = replace(observed, inbox=self._inboxes.of(key))
        if observed.inbox.report is None or observed.report is not None:
            return observed
        self._inboxes.forget(key)
        return replace(observed, inbox=self._inboxes.of(key))

    def _forget(self, key: JobKey) -> None:
        if self._inboxes is not None:
            self._inboxes.forget(key)

    async def _carry_out(self, decided: Plan, job: Object, key: JobKey) -> bool:
        """False if the job changed meanwhile, so that the rest of the plan is out of date."""
        metadata = job["metadata"]
        not_found = self._not_found.pop(key, set())

        async def is_still_wanted() -> bool:
            try:
                now = (await self._cluster.get(JOBS, key.namespace, key.name))["metadata"]
            except NotFound:
                return False
            same = all(now.get(field) == metadata.get(field) for field in ("uid", "generation"))
            return same and "deletionTimestamp" not in now

        async def act(action: Action) -> None:
            await self._act(action, job, key, not_found)

        for stage in decided.stages:
            done: Counter[str] = Counter()
            try:
                if not await carry_out(stage, act, is_still_wanted, self._side_by_side, done):
                    return False
            finally:
                if done:
                    what = ", ".join(f"{verb} x {count}" for verb, count in done.items())
                    log.info("carried out %s", what, extra={"job": str(key), "uid": metadata["uid"]})
        return True

    async def _act(self, action: Action, job: Object, key: JobKey, not_found: Set[str]) -> None:
        """`not_found`: the uids that the last pass wanted to delete and the cluster did not find."""
        match action:
            case Create(body, optional=True):
                await self._create_optional(body, job, key)
            case Create(body):
                await self._create(body, job, key)
            case DeletePod(name, uid, force):
                await self._delete(PODS, key, name, uid, not_found, grace_seconds=0 if force else None)
            case DeleteConfigMap(name):
                await self._delete_own_config_map(job, key, name, not_found)
            case DeleteJob(name, uid):
                await self._delete(JOBS, key, name, uid, not_found)
            case AskForStacks():
                if self._inboxes is not None:
                    self._inboxes.ask_for_stacks(key)
            case LookAtEvents(pods):
                await self._notebook.look_at_events(key, dict(pods))

    async def _create(self, body: Object, job: Object, key: JobKey, *, optional: bool = False) -> None:
        kind, name = body["kind"], body["metadata"]["name"]
        try:
            await self._cluster.create(body)
        except AlreadyExists:
            existing = await self._cluster.get(resource_of(body), key.namespace, name)
            if obstacle := name_taken(kind, existing, job):
                raise Refused(obstacle, kind) from None
        except Forbidden as error:
            obstacle = Obstacle(Reason.FORBIDDEN, f"the operator may not create {kind} {name}: {error}")
            raise Refused(obstacle, kind, sure=False) from error
        except Invalid as error:
            raise Refused(Obstacle(Reason.REJECTED, f"the cluster rejects {kind} {name}: {error}"), kind) from error
        except NotFound as error:
            if not optional:
                raise
            obstacle = Obstacle(Reason.REJECTED, f"the cluster does not know the kind {kind}: {error}")
            raise Refused(obstacle, kind, sure=False) from error

    async def _create_optional(self, body: Object, job: Object, key: JobKey) -> None:
        """The gang starts without the object only if its refusal lasts: an attempt may run for weeks, and there is no
        second chance."""
        try:
            await self._create(body, job, key, optional=True)
        except Refused as refused:
            if refused.obstacle.passes:
                raise
            if key in self._told_optional:
                return
            if wait := self._doubt(refused, key):
                raise _Unconfirmed(wait) from refused
            self._told_optional.add(key)
            message = f"the gang runs without its {body['kind']}: {refused}"
            log.warning("%s", message, extra={"job": str(key)})
            await self._send((Event(EventReason.NETWORK_POLICY_MISSING, message, warning=True),), job, key)
        else:
            self._told_optional.discard(key)

    async def _delete_own_config_map(self, job: Object, key: JobKey, name: str, not_found: Set[str]) -> None:
        try:
            existing = await self._cluster.get(CONFIG_MAPS, key.namespace, name)
        except NotFound:
            return
        if is_ours(existing, job):
            await self._delete(CONFIG_MAPS, key, name, existing["metadata"]["uid"], not_found)

    async def _delete(
        self,
        resource: Resource,
        key: JobKey,
        name: str,
        uid: str,
        not_found: Set[str],
        grace_seconds: int | None = None,
    ) -> None:
        try:
            await self._cluster.delete(resource, key.namespace, name, uid, grace_seconds=grace_seconds)
        except NotFound as error:
            self._not_found.setdefault(key, set()).add(uid)
            if uid in not_found:
                message = f"{resource.kind} {name} exists when it is read, but is not found when it is deleted: {error}"
                raise NotFound(error.status, error.reason, message) from error
            log.debug("%s %s was gone before it was deleted", resource.kind, name, extra={"job": str(key)})

    async def _write_status(
        self, decided: Plan, known_good: Status, before: Status, job: Object, key: JobKey
    ) -> Status:
        """Writes the status if it changed, and returns it."""
        after = decided.status or known_good
        if after == before:
            return before
        await self._write(after, before, job, key, decided.events if after != known_good else ())
        # A progress report alone is not worth a line in the log.
        level = logging.DEBUG if after.conditions == before.conditions else logging.INFO
        context = {"job": str(key), "uid": job["metadata"]["uid"], "attempt": after.attempt}
        log.log(level, "job is %s", _without_words(before, after), extra=context)
        return after

    async def _write(self, after: Status, before: Status, job: Object, key: JobKey, events: tuple[Event, ...]) -> None:
        written = await self._cluster.update_status({**job, "status": after.as_json()})
        self._written[key] = written["metadata"]["resourceVersion"]
        self._notebook.wrote_status(key)
        if self._metrics:
            self._metrics.status_written(before, after)
        await self._send(events, job, key)

    async def _send(self, events: tuple[Event, ...], job: Object, key: JobKey) -> bool:
        """False if one of them could not be sent."""
        sent = True
        for event in events:
            try:
                await self._cluster.create(event_body(event, job, self._clock()))
            except ApiError as error:
                sent = False
                log.warning("event %s could not be sent: %s", event.reason, error, extra={"job": str(key)})
        return sent


def _without_words(before: Status, after: Status) -> str:
    """State and reason, and the class and exit code of a new failure. Not the messages: they end with the log of the
    user's program, and readers of the operator's log may not be allowed to read the job."""
    ready = find(after.conditions, ConditionType.READY)
    text = f"{after.state} ({ready.reason})" if ready else str(after.state)
    failure = after.last_failure
    if failure is None or failure == before.last_failure:
        return text
    code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
    return f"{text}: {failure.pod} failed with {failure.failure_class} ({failure.reason}{code})"


def _words(error: Exception) -> str:
    """For the job's owner, who can only pass it on to an administrator."""
    match error:
        case ApiError(status=0):
            return f"the API server cannot be reached: {error}; retrying"
        case ApiError(status=status):
            return f"the API server answered {status}: {error}; retrying"
        case _:
            return f"the operator failed with {type(error).__name__}: {error}; its log has the details; retrying"
