"""One pass over one job: read the truth, plan, act, write the status once. Called by `runtime.controller`.

The order matters. Actions come before the status, so that a status never claims what was not done; an attempt is
raised in a pass without actions, so that nothing is done that the status does not know.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from tpu_training_operator.api.conditions import ConditionType, Reason, find
from tpu_training_operator.api.constants import LABEL_JOB_NAME
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
from tpu_training_operator.domain.blocked import Obstacle, blocked, name_taken
from tpu_training_operator.domain.isolation import Isolation
from tpu_training_operator.domain.observed import Observed
from tpu_training_operator.domain.ownership import is_ours
from tpu_training_operator.domain.plan import plan
from tpu_training_operator.domain.report import Reporting
from tpu_training_operator.runtime.cluster import (
    CONFIG_MAPS,
    JOBS,
    PODS,
    AlreadyExists,
    ApiError,
    Cluster,
    Forbidden,
    Invalid,
    NotFound,
    Object,
    Resource,
    resource_of,
)
from tpu_training_operator.runtime.events import event_body
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.keys import JobKey
from tpu_training_operator.runtime.notebook import Notebook
from tpu_training_operator.runtime.observers import SILENT_JOBS, JobObserver

log = logging.getLogger(__name__)


class _Refused(Exception):
    """An action that will be refused again until somebody changes something."""

    def __init__(self, obstacle: Obstacle) -> None:
        super().__init__(obstacle.message)
        self.obstacle = obstacle


class Reconciler:
    """`inboxes` and `reporting`: what workers report, and where; both or neither. `isolation`: of a job's workers from
    other pods; None where they are left open. `side_by_side`: how many requests of one stage may be under way at once.
    `notebook`: what is remembered from pass to pass."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], datetime],
        *,
        inboxes: Inboxes | None = None,
        reporting: Reporting | None = None,
        isolation: Isolation | None = None,
        observer: JobObserver = SILENT_JOBS,
        side_by_side: int = 32,
        notebook: Notebook | None = None,
    ) -> None:
        self._cluster = cluster
        self._notebook = notebook or Notebook(cluster, clock)
        self._clock = clock
        self._inboxes = inboxes
        self._reporting = reporting
        self._isolation = isolation
        self._told_optional: set[JobKey] = set()
        self._observer = observer
        self._side_by_side = side_by_side
        self._written: dict[JobKey, str] = {}

    def wrote(self, key: JobKey, version: str) -> bool:
        """Whether this resourceVersion of the job is of the status that was written here last."""
        return self._written.get(key) == version

    async def reconcile(self, key: JobKey) -> timedelta | None:
        """Bring the job one step closer to what was asked for.

        Returns the time after which to look again even if nothing is heard. Raises ApiError where another try is
        due: Conflict when the job has changed meanwhile, Unavailable when the cluster could not answer.
        """
        try:
            job = await self._cluster.get(JOBS, key.namespace, key.name)
        except NotFound:
            self._forget(key)
            self._notebook.forget(key)
            self._written.pop(key, None)
            self._told_optional.discard(key)
            self._observer.job_gone(key)
            return None
        # After the job: pods read before it could lack the workers of an attempt that it has left behind.
        pods = await self._cluster.list(PODS, key.namespace, {LABEL_JOB_NAME: key.name})
        observed = replace(self._with_inbox(Observed.of(job, pods), key), notes=self._notebook.of(key))
        decided = plan(observed, self._clock(), self._reporting)
        if self._isolation is not None:
            decided = self._isolation.applied(decided, job)
        try:
            for stage in decided.stages:
                await self._carry_out(stage, job, key)
        except _Refused as refused:
            decided = blocked(observed, refused.obstacle, self._clock())
        status = await self._write_status(decided, job, key)
        self._observer.job_seen(key, status.state)
        if status.completion_time is not None:
            self._forget(key)
            self._notebook.forget(key)
        return decided.again

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

    async def _carry_out(self, stage: Sequence[Action], job: Object, key: JobKey) -> None:
        limit = asyncio.Semaphore(self._side_by_side)
        refused = False

        async def one(action: Action) -> None:
            nonlocal refused
            async with limit:
                if refused:
                    # What is refused once is refused to the rest of a gang, too: two thousand times, over a quota.
                    return
                try:
                    await self._act(action, job, key)
                except _Refused:
                    refused = True
                    raise

        results = await asyncio.gather(*map(one, stage), return_exceptions=True)
        if errors := [result for result in results if isinstance(result, BaseException)]:
            # What cannot heal by itself is what a person must hear of first.
            raise next((error for error in errors if isinstance(error, _Refused)), errors[0])
        if stage:
            log.info("carried out %s", _summary(stage), extra={"job": str(key), "uid": job["metadata"]["uid"]})

    async def _act(self, action: Action, job: Object, key: JobKey) -> None:
        match action:
            case Create(body, optional=True):
                await self._create_optional(body, job, key)
            case Create(body):
                await self._create(body, job, key)
            case DeletePod(name, uid, force):
                await self._delete(PODS, key, name, uid, grace_seconds=0 if force else None)
            case DeleteConfigMap(name):
                await self._delete_own_config_map(job, key, name)
            case DeleteJob(name, uid):
                await self._delete(JOBS, key, name, uid)
            case AskForStacks():
                if self._inboxes is not None:
                    self._inboxes.ask_for_stacks(key)
            case LookAtEvents(pods):
                await self._notebook.look_at_events(key, dict(pods))

    async def _create(self, body: Object, job: Object, key: JobKey) -> None:
        kind, name = body["kind"], body["metadata"]["name"]
        try:
            await self._cluster.create(body)
        except AlreadyExists:
            existing = await self._cluster.get(resource_of(body), key.namespace, name)
            if obstacle := name_taken(kind, existing, job):
                raise _Refused(obstacle) from None
        except Forbidden as error:
            raise _Refused(Obstacle(Reason.FORBIDDEN, f"{kind} {name} may not be created: {error}")) from error
        except Invalid as error:
            raise _Refused(Obstacle(Reason.REJECTED, f"{kind} {name} was refused: {error}")) from error

    async def _create_optional(self, body: Object, job: Object, key: JobKey) -> None:
        try:
            await self._create(body, job, key)
        except (_Refused, ApiError) as error:
            if key not in self._told_optional:
                self._told_optional.add(key)
                message = f"the gang runs without its {body['kind']}: {error}"
                log.warning("%s", message, extra={"job": str(key)})
                await self._send((Event(f"{body['kind']}Missing", message, warning=True),), job, key)

    async def _delete_own_config_map(self, job: Object, key: JobKey, name: str) -> None:
        try:
            existing = await self._cluster.get(CONFIG_MAPS, key.namespace, name)
        except NotFound:
            return
        if is_ours(existing, job):
            await self._delete(CONFIG_MAPS, key, name, existing["metadata"]["uid"])

    async def _delete(
        self, resource: Resource, key: JobKey, name: str, uid: str, grace_seconds: int | None = None
    ) -> None:
        try:
            await self._cluster.delete(resource, key.namespace, name, uid, grace_seconds=grace_seconds)
        except NotFound:
            log.debug("%s %s was gone before it was deleted", resource.kind, name, extra={"job": str(key)})

    async def _write_status(self, decided: Plan, job: Object, key: JobKey) -> Status:
        """The status as it stands afterwards."""
        before = Status.model_validate(job.get("status") or {})
        after = decided.status
        if after is None or after == before:
            return before
        written = await self._cluster.update_status({**job, "status": status_body(after)})
        self._written[key] = written["metadata"]["resourceVersion"]
        self._notebook.wrote_status(key)
        self._observer.status_written(before, after)
        # A report alone is no decision.
        level = logging.DEBUG if after.conditions == before.conditions else logging.INFO
        context = {"job": str(key), "uid": job["metadata"]["uid"], "attempt": after.attempt}
        log.log(level, "job is %s", _without_words(before, after), extra=context)
        await self._send(decided.events, job, key)
        return after

    async def _send(self, events: tuple[Event, ...], job: Object, key: JobKey) -> None:
        for event in events:
            try:
                await self._cluster.create(event_body(event, job, self._clock()))
            except ApiError as error:
                log.warning("event %s could not be sent: %s", event.reason, error, extra={"job": str(key)})


def status_body(status: Status) -> Object:
    """The status as it stands in the object: what is empty is absent."""
    body: Object = _without_empty(status.model_dump(by_alias=True, exclude_none=True, mode="json"))
    return body


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {key: _without_empty(part) for key, part in value.items()}
    return {key: part for key, part in kept.items() if part not in ({}, [])}


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


def _summary(stage: Sequence[Action]) -> str:
    counts = Counter(map(_verb, stage))
    return ", ".join(f"{what} x {count}" for what, count in counts.items())


def _verb(action: Action) -> str:
    match action:
        case Create(body):
            return f"create {body['kind']}"
        case DeletePod(force=force):
            return "delete Pod by force" if force else "delete Pod"
        case DeleteConfigMap():
            return "delete old ConfigMap"
        case DeleteJob():
            return "delete finished job"
        case AskForStacks():
            return "ask for stacks"
        case LookAtEvents():
            return "look at events"
