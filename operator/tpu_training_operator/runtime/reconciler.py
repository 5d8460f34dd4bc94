"""One pass over one job: read the truth, plan, act, write the status once.

The order matters. Actions come before the status, so that a status never claims what was not done; an attempt is raised
in a pass without actions, so that nothing is done that the status does not know.
"""

import logging
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import replace
from datetime import datetime, timedelta

from pydantic import ValidationError

from tpu_training_operator.api.conditions import ConditionType, Reason, find
from tpu_training_operator.api.constants import LABEL_JOB_NAME, MAX_HOSTS
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.actions import (
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
from tpu_training_operator.domain.lifecycle.blocked import Obstacle, blocked, name_taken
from tpu_training_operator.domain.lifecycle.plan import plan
from tpu_training_operator.domain.lifecycle.retrying import recovered, retrying
from tpu_training_operator.domain.objects.network_policy import Isolation
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

_AT_ONCE = timedelta(0)
# Longer than an API server takes to be replaced by another, or a role to reach all of them.
_DOUBT = timedelta(seconds=10)
_FAILURES_BEFORE_TOLD = 3
# Three seconds of retries. A job or a pod that has changed since it was read is read again long before.
_CONFLICTS_BEFORE_TOLD = 6
# Five seconds for the largest gang, of which a restart takes minutes.
_SECONDS_PER_POD = 0.001


class _Unconfirmed(Exception):
    """A refusal of an object that may be missing; after `wait` it is known whether it lasts."""

    def __init__(self, wait: timedelta) -> None:
        super().__init__()
        self.wait = wait


class Reconciler:
    """`inboxes` and `reporting`: what workers report, and where; both or neither. `isolation`: of a job's workers from
    other pods; None where they are left open. `side_by_side`: how many requests of one stage may be under way at once.
    `max_hosts`: no larger job is begun."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], datetime],
        *,
        inboxes: Inboxes | None = None,
        reporting: Reporting | None = None,
        isolation: Isolation | None = None,
        metrics: Metrics | None = None,
        side_by_side: int = 32,
        max_hosts: int = MAX_HOSTS,
    ) -> None:
        self._cluster = cluster
        self._notebook = Notebook(cluster, clock)
        self._clock = clock
        self._inboxes = inboxes
        self._reporting = reporting
        self._isolation = isolation
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
        # Jobs whose owners have an event about the passes that fail.
        self._told_failing: set[JobKey] = set()
        # Since when an object of a kind is refused that may be taken in a moment.
        self._doubted: dict[JobKey, dict[str, datetime]] = {}
        # The uids of what the last pass was to delete and the cluster did not find.
        self._not_found: dict[JobKey, set[str]] = {}

    def wrote(self, key: JobKey, version: str) -> bool:
        """Whether this resourceVersion of the job is of the status that was written here last."""
        return self._written.get(key) == version

    def settle_seconds(self, key: JobKey) -> float:
        """How long a hint about the job is worth waiting for others: every pass reads all of its pods, and the pods of
        a large gang start one by one."""
        return self._pods.get(key, 0) * _SECONDS_PER_POD

    async def reconcile(self, key: JobKey) -> timedelta | None:
        """Bring the job one step closer to what was asked for.

        Returns the time after which to look again even if nothing is heard. Raises ApiError where another try is
        due: Conflict when something has changed since it was read, Unavailable when the cluster could not answer.
        Passes that go on failing are told in the job's status, or in an event where the status cannot be written.
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
        # After the job: pods read before it could lack the workers of an attempt that it has left behind.
        pods = await self._cluster.list(PODS, key.namespace, {LABEL_JOB_NAME: key.name})
        self._pods[key] = len(pods)
        before = Status.read(job.get("status"))
        # The planner decides as if no pass had failed.
        known_good = recovered(before)
        seen = job if known_good is before else {**job, "status": known_good.as_json()}
        observed = replace(self._with_inbox(Observed.of(seen, pods), key), notes=self._notebook.of(key))
        decided = plan(observed, self._clock(), self._reporting, max_hosts=self._max_hosts)
        if self._isolation is not None:
            decided = self._isolation.applied(decided, job)
        try:
            if not await self._carry_out(decided, job, key):
                return _AT_ONCE
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
        """How long to wait until the refusal is believed; None where it is. An API server that is being replaced may
        refuse what it takes a moment later."""
        if refused.sure:
            return None
        now = self._clock()
        wait = self._doubted.setdefault(key, {}).setdefault(refused.kind, now) + _DOUBT - now
        # A clock that was set back must not put it off.
        if not _AT_ONCE < wait <= _DOUBT:
            return None
        log.info("refused, to be confirmed: %s", refused, extra={"job": str(key)})
        return wait

    async def _failed(self, key: JobKey, error: Exception) -> None:
        """One more pass that failed; after a few of them in a row the job says why."""
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        # What has changed since it was read is no failure, unless it never ends: an admission webhook may say 409, too.
        if failures < (_CONFLICTS_BEFORE_TOLD if isinstance(error, Conflict) else _FAILURES_BEFORE_TOLD):
            return
        try:
            job = await self._cluster.get(JOBS, key.namespace, key.name)
        except ApiError as failure:
            log.warning("what is wrong cannot be told: %s", failure, extra={"job": str(key)})
            return
        is_news = key not in self._told_failing
        try:
            before = Status.read(job.get("status"))
            is_news = is_news and recovered(before) is before
            # The status of a finished job says how it ended.
            if before.completion_time is None:
                after = retrying(before, _words(error), job["metadata"].get("generation", 1), self._clock())
                if after != before:
                    await self._write(after, before, job, key, ())
        except (ApiError, ValidationError) as failure:
            log.warning("what is wrong cannot be told in the job's status: %s", failure, extra={"job": str(key)})
        event = Event("Retrying", _words(error), warning=True)
        if is_news and await self._send((event,), job, key):
            self._told_failing.add(key)

    def _with_inbox(self, observed: Observed, key: JobKey) -> Observed:
        """With what the job's own workers have said; of a namesake's, which is gone or going, nothing is kept."""
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
        """False where the job has changed meanwhile, so that the rest of the plan is not what it wants."""
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
        """`not_found`: the uids that the last pass could not delete, for the cluster did not find them."""
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
            obstacle = Obstacle(Reason.FORBIDDEN, f"{kind} {name} may not be created: {error}")
            raise Refused(obstacle, kind, sure=False) from error
        except Invalid as error:
            raise Refused(Obstacle(Reason.REJECTED, f"{kind} {name} was refused: {error}"), kind) from error
        except NotFound as error:
            if not optional:
                raise
            obstacle = Obstacle(Reason.REJECTED, f"the cluster does not know the kind {kind}: {error}")
            raise Refused(obstacle, kind, sure=False) from error

    async def _create_optional(self, body: Object, job: Object, key: JobKey) -> None:
        """Without it the gang begins only where its refusal lasts: an attempt may take weeks, and gets no other
        chance."""
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
            await self._send((Event(f"{body['kind']}Missing", message, warning=True),), job, key)
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
                message = f"{resource.kind} {name} is there when it is read, and not found when it is deleted: {error}"
                raise NotFound(error.status, error.reason, message) from error
            log.debug("%s %s was gone before it was deleted", resource.kind, name, extra={"job": str(key)})

    async def _write_status(
        self, decided: Plan, known_good: Status, before: Status, job: Object, key: JobKey
    ) -> Status:
        """The status as it stands afterwards."""
        after = decided.status or known_good
        if after == before:
            return before
        await self._write(after, before, job, key, decided.events if after != known_good else ())
        # A report alone is no decision.
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
        """False where one of them could not be sent."""
        sent = True
        for event in events:
            try:
                await self._cluster.create(event_body(event, job, self._clock()))
            except ApiError as error:
                sent = False
                log.warning("event %s could not be sent: %s", event.reason, error, extra={"job": str(key)})
        return sent


def _without_words(before: Status, after: Status) -> str:
    """State and reason, and of a new failure its class and exit code. The messages end with the log of the user's
    program, which is for those who may read the job, not for those who may read the operator's log."""
    ready = find(after.conditions, ConditionType.READY)
    text = f"{after.state} ({ready.reason})" if ready else str(after.state)
    failure = after.last_failure
    if failure is None or failure == before.last_failure:
        return text
    code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
    return f"{text}: {failure.pod} failed with {failure.failure_class} ({failure.reason}{code})"


def _words(error: Exception) -> str:
    """For the job's owner, who can do nothing about it but tell an administrator."""
    match error:
        case ApiError(status=0):
            return f"the API server cannot be reached: {error}; retrying"
        case ApiError(status=status):
            return f"the API server answers {status}: {error}; retrying"
        case _:
            return f"the operator fails: {type(error).__name__}: {error}; its log says more; retrying"
