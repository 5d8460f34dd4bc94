"""Carries out a plan: creates and deletes objects, batch after batch, the actions of a batch as a stream.

Some actions run concurrently, and the next one begins when one has ended. The job is read again from time to time, in
case it no longer wants the rest: a batch of a large gang takes a while. A batch also ends early if an action is
refused, or if several requests in a row fail, because the rest would fail, too.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import EventReason, Reason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.domain.cluster_state.obstacles import (
    Obstacle,
    explain_change,
    explain_taken_name,
    in_one_order,
    limit_range_remedy,
    pod_security_remedy,
)
from tpu_training_operator.domain.cluster_state.ownership import is_ours
from tpu_training_operator.domain.cluster_state.pod_events import explain_wait
from tpu_training_operator.domain.cluster_state.worker_reports import Notes, PodEvents
from tpu_training_operator.domain.job.naming import service_name
from tpu_training_operator.domain.objects.actions import (
    Action,
    AskForStacks,
    Create,
    Delete,
    Event,
    LookAtEvents,
    Publish,
    UpdateWorkload,
    WarnPlaceholderRefused,
    WriteWorkloadStatus,
)
from tpu_training_operator.domain.objects.endpoints import content
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.kube.cluster import (
    CONFIG_MAPS,
    ENDPOINT_SLICES,
    ENDPOINTS,
    EVENTS,
    JOBS,
    PODS,
    SERVICES,
    Cluster,
    JobKey,
    Object,
    Resource,
    resource_of,
)
from tpu_training_operator.kube.errors import AlreadyExists, ApiError, Conflict, Forbidden, InvalidRequest, NotFound
from tpu_training_operator.kube.turns import Flow, flow
from tpu_training_operator.runtime.events import send_events
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.name_servers import NameServers

log = logging.getLogger(__name__)

# As many as there are places for all jobs: each has another one of its own (`kube.turns`).
_SIDE_BY_SIDE = 32
# The job is read again after so many actions, or after so much time, because a few actions of a slow API server take as
# long as many.
_LOOK_EVERY = 32
_LOOK_AFTER = timedelta(seconds=5)
_CHANGES = ("uid", "generation", "deletionTimestamp")
_FAILURES_IN_A_ROW = 3
# Kinds whose objects belong to one attempt: the next attempt deletes them.
_OF_ONE_ATTEMPT = (CONFIG_MAPS, ENDPOINT_SLICES)
# Longer than an API server takes to be replaced, or a role to reach all API servers.
_DOUBT = timedelta(seconds=10)
# Creating and deleting a pod is a hint. If every pass did that, each pass would cause the next one.
_CHANGED_PAUSE = timedelta(seconds=30)


class Refused(Exception):
    """An action was refused, and will be until a person changes something. `kind`: of the refused object."""

    def __init__(self, obstacle: Obstacle, kind: str, *, sure: bool = True) -> None:
        super().__init__(obstacle.message)
        self.obstacle = obstacle
        self.kind = kind
        self.sure = sure
        """False: an API server that is being replaced may refuse what it accepts a moment later."""


class Unconfirmed(Exception):
    """An action was refused, perhaps only for a moment. It is to be tried again after `wait`."""

    def __init__(self, wait: timedelta) -> None:
        super().__init__()
        self.wait = wait


@dataclass
class Memory:
    """The memory of one operator process about a job between passes. Without it, a write, an event or a list is
    repeated once."""

    notes: Notes = field(default_factory=Notes)
    version: str = ""
    """resourceVersion of the status written last."""
    began: str = ""
    """That version, if the status began the first attempt of a job that had no pods."""
    pods: int = 0
    is_restarting: bool = False
    """Whether the gang is being restarted, by the status after the last pass."""
    failed_passes: int = 0
    """The number of passes that failed in a row."""
    sent_retrying: bool = False
    sent_missing: set[str] = field(default_factory=set)
    """The kinds of missing optional objects about which an event was sent."""
    refused_since: dict[str, datetime] = field(default_factory=dict)
    """By the kind of object, while the refusal may be temporary."""
    changed: tuple[datetime, Obstacle] | None = None
    """When the cluster last changed a pod at its creation, and how."""
    made: dict[tuple[str, str], str] = field(default_factory=dict)
    """uids of objects that were created for the attempt, by kind and name, which need not be read before their
    deletion."""
    not_found: set[str] = field(default_factory=set)
    """uids that the last pass wanted to delete and the API server did not find."""

    def changed_just_now(self, now: datetime) -> Obstacle | None:
        """Returns the change that the cluster would also make to the next pod; None if another try is due."""
        return self.changed[1] if self.changed and timedelta(0) <= now - self.changed[0] < _CHANGED_PAUSE else None

    def confirm(self, refused: Refused, now: datetime) -> None:
        """Raises Unconfirmed while the refusal may be temporary."""
        if refused.sure:
            return
        wait = self.refused_since.setdefault(refused.kind, now) + _DOUBT - now
        # A longer wait shows that the clock was set back.
        if timedelta(0) < wait <= _DOUBT:
            raise Unconfirmed(wait) from refused


@dataclass
class PlanExecution:
    """One pass's actions for `job`. `name_servers`: None if they may need any form of addresses."""

    cluster: Cluster
    clock: Callable[[], datetime]
    inboxes: Inboxes | None
    key: JobKey
    job: Object
    memory: Memory
    name_servers: NameServers | None = None
    _not_found_before: set[str] = field(default_factory=set, init=False)
    _was_there: Counter[str] = field(default_factory=Counter, init=False)
    """Counts, by verb, the objects of the present batch that existed already as they should be."""

    async def carry_out(self, plan: Plan) -> bool:
        """Returns False if the job has changed in the meantime, so that the rest of the plan no longer applies. Raises
        Refused, Unconfirmed and ApiError; preferably a refusal, because a retry does not help."""
        self._not_found_before, self.memory.not_found = self.memory.not_found, set()
        try:
            for batch in plan.batches:
                if not await self._batch(batch.actions):
                    return False
        except Refused as refused:
            self.memory.confirm(refused, self.clock())
            raise
        self.memory.refused_since.clear()
        return True

    async def _batch(self, actions: Sequence[Action]) -> bool:
        self._was_there.clear()
        with flow() as requests:
            stream = _Stream(self, actions, requests)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(_SIDE_BY_SIDE, len(actions))):
                        tasks.create_task(stream.work())
            finally:
                # Objects that existed are left out, or a blocked job would log the same in every pass.
                if done := stream.done - self._was_there:
                    what = ", ".join(f"{verb} x {count}" for verb, count in done.items())
                    log.info("carried out %s", what, extra={"job": str(self.key), "uid": self.job["metadata"]["uid"]})
        if stream.errors:
            raise next((error for error in stream.errors if isinstance(error, Refused)), stream.errors[0])
        return stream.is_wanted

    async def is_still_wanted(self) -> bool:
        try:
            now = (await self.cluster.get(JOBS, self.key.namespace, self.key.name))["metadata"]
        except NotFound:
            return False
        # A job that is being deleted still wants its workers to be stopped.
        return all(now.get(name) == self.job["metadata"].get(name) for name in _CHANGES)

    async def act(self, action: Action) -> bool:
        """Carries out one action. Returns False if the rest of its batch is useless because of it."""
        match action:
            case Create(optional=True, for_better_slice=for_better_slice):
                return await self._create_optional(action) or not for_better_slice
            case Create(body, again=again):
                await self._create(body, again=again)
            case Delete(kind, name, uid, force, api_version):
                resource = resource_of({"kind": kind, "apiVersion": api_version})
                if uid is None:
                    await self._delete_own(resource, name)
                else:
                    await self._delete(resource, name, uid, grace_seconds=0 if force else None)
            case Publish(bodies, version):
                for body in bodies:
                    if resource_of(body) is ENDPOINTS and not await self._need_endpoints():
                        continue
                    # Nothing deletes the Endpoints between attempts.
                    again = resource_of(body) is ENDPOINTS and self.memory.notes.published is not None
                    await self._create(body, again=again, replaces=True)
                self.memory.notes = replace(self.memory.notes, published=version)
            case AskForStacks():
                if self.inboxes is not None:
                    self.inboxes.ask_for_stacks(self.key)
            case WarnPlaceholderRefused(why):
                await self._warn_missing("Pod", why)
                self.memory.notes = replace(
                    self.memory.notes, placeholder_warnings=self.memory.notes.placeholder_warnings | {why}
                )
            case LookAtEvents(pods):
                await self._look_at_events(pods)
            case UpdateWorkload(body):
                await self.cluster.update(body)
            case WriteWorkloadStatus(body):
                await self.cluster.update_status(body)
        return True

    async def _create(
        self, body: Object, *, optional: bool = False, again: bool = False, replaces: bool = False
    ) -> None:
        """Creates an object. `again`: it is read first, which costs the API server less than refusing its creation.
        `replaces`: an existing object of the job gets the same content."""
        resource, name = resource_of(body), body["metadata"]["name"]
        existing = None
        if again:
            # An operator without the right to read it may still be allowed to create it.
            with suppress(Forbidden):
                existing = await self._existing(resource, name)
        if existing is None:
            if resource is PODS and (changed := self.memory.changed_just_now(self.clock())):
                raise Refused(changed, body["kind"])
            with _refusals(body, optional=optional), suppress(AlreadyExists):
                created = await self.cluster.create(body)
                if resource is PODS and (changed := explain_change(body, created)):
                    self.memory.changed = self.clock(), changed
                    await self._delete(PODS, name, created["metadata"]["uid"])
                    raise Refused(changed, body["kind"])
                if resource in _OF_ONE_ATTEMPT:
                    self.memory.made[resource.kind, name] = created["metadata"]["uid"]
                return
            existing = await self.cluster.get(resource, self.key.namespace, name)
        if resource is ENDPOINTS and not is_ours(existing, self.job):
            service = await self.cluster.get(SERVICES, self.key.namespace, service_name(self.key.name))
            if service["spec"].get("selector"):
                # An earlier version of this operator created it, and the controller manager keeps its Endpoints.
                return
        if obstacle := explain_taken_name(body["kind"], existing, self.job):
            raise Refused(obstacle, body["kind"])
        if replaces and content(existing) != content(body):
            with _refusals(body):
                await self.cluster.update(existing | content(body))
        if resource is CONFIG_MAPS and existing.get("data") != body["data"] and not self.memory.pods:
            # No pod uses it, and it is older than an edit of the spec or an upgrade. It is immutable.
            await self._delete(resource, name, existing["metadata"]["uid"])
            with _refusals(body):
                created = await self.cluster.create(body)
            self.memory.made[resource.kind, name] = created["metadata"]["uid"]
            return
        self._was_there[f"create {body['kind']}"] += 1

    async def _need_endpoints(self) -> bool:
        return self.name_servers is None or await self.name_servers.need_endpoints()

    async def _existing(self, resource: Resource, name: str) -> Object | None:
        try:
            return await self.cluster.get(resource, self.key.namespace, name)
        except NotFound:
            return None

    async def _create_optional(self, wanted: Create) -> bool:
        """Returns whether the object exists now. The gang starts without it only if its refusal is permanent: an
        attempt may take weeks, and the object is not created later."""
        body, kind = wanted.body, wanted.body["kind"]
        try:
            await self._create(body, optional=True, again=wanted.again)
        except Refused as refused:
            if refused.obstacle.passes and not wanted.for_better_slice:
                raise
            if not refused.obstacle.passes and kind not in self.memory.sent_missing:
                self.memory.confirm(refused, self.clock())
                self.memory.sent_missing.add(kind)
                await self._warn_missing(kind, str(refused))
            return False
        self.memory.sent_missing.discard(kind)
        return True

    async def _warn_missing(self, kind: str, why: str) -> None:
        is_policy = kind == "NetworkPolicy"
        without = f"runs without its {kind}" if is_policy else "cannot ask for a better slice"
        message = f"the gang {without}: {why}"
        log.warning("%s", message, extra={"job": str(self.key)})
        reason = EventReason.NETWORK_POLICY_MISSING if is_policy else EventReason.PLACEHOLDER_REFUSED
        event = Event(reason, message, warning=True)
        await send_events(self.cluster, (event,), self.job, self.clock())

    async def _delete_own(self, resource: Resource, name: str) -> None:
        if uid := self.memory.made.pop((resource.kind, name), None):
            with suppress(Conflict):
                await self._delete(resource, name, uid)
                return
        existing = await self._existing(resource, name)
        if existing is not None and is_ours(existing, self.job):
            await self._delete(resource, name, existing["metadata"]["uid"])

    async def _delete(self, resource: Resource, name: str, uid: str, grace_seconds: int | None = None) -> None:
        try:
            await self.cluster.delete(resource, self.key.namespace, name, uid, grace_seconds=grace_seconds)
        except NotFound as error:
            self.memory.not_found.add(uid)
            if uid in self._not_found_before:
                message = f"{resource.kind} {name} exists when it is read, but is not found when it is deleted: {error}"
                raise NotFound(error.status, error.reason, message) from error
            log.debug("%s %s was gone before it was deleted", resource.kind, name, extra={"job": str(self.key)})

    async def _look_at_events(self, pods: Sequence[tuple[str, str]]) -> None:
        """Notes the events of the pods, given by name and uid. If they cannot be read, the job continues without
        them."""
        lines = {}
        try:
            for name, uid in pods:
                events = await self.cluster.list(EVENTS, self.key.namespace, None, {"regarding.uid": uid})
                if line := explain_wait(events):
                    lines[name] = line
        except ApiError as error:
            level = logging.WARNING if self.memory.notes.events is None else logging.DEBUG
            log.log(level, "the events of pods cannot be read: %s", error, extra={"job": str(self.key)})
        self.memory.notes = replace(self.memory.notes, events=PodEvents(self.clock(), lines))


class _Stream:
    """The actions of one batch, taken in order by several tasks."""

    def __init__(self, execution: PlanExecution, actions: Sequence[Action], requests: Flow) -> None:
        self._execution = execution
        self._actions = actions
        self._requests = requests
        self._rest = iter(range(len(actions)))
        self._looked_at = execution.clock()
        self._failures = 0
        self._is_over = False
        self.done: Counter[str] = Counter()
        self.errors: list[Exception] = []
        self.is_wanted = True

    async def work(self) -> None:
        """Acts until nothing is left, or the rest is of no use."""
        for number in self._rest:
            try:
                if self._is_time_to_look(number) and not await self._execution.is_still_wanted():
                    self.is_wanted = False
                    self._end()
                if self._is_over:
                    return
                action = self._actions[number]
                goes_on = await self._execution.act(action)
            except Exception as error:
                self._note(error)
            else:
                self._failures = 0
                self.done[action.verb] += 1
                if not goes_on:
                    self._end()

    def _is_time_to_look(self, number: int) -> bool:
        now = self._execution.clock()
        # A clock that was set back must not delay the look.
        is_time = number > 0 and (number % _LOOK_EVERY == 0 or not timedelta(0) <= now - self._looked_at < _LOOK_AFTER)
        if is_time:
            self._looked_at = now
        return is_time

    def _note(self, error: Exception) -> None:
        # Thousands can fail, though never many in a row. One error is raised, preferably a refusal.
        if not self.errors or isinstance(error, Refused):
            self.errors.append(error)
        self._failures += 1
        if isinstance(error, Refused) or self._failures >= _FAILURES_IN_A_ROW:
            self._end()

    def _end(self) -> None:
        """Ends the batch. Requests under way are awaited, because only their answers show their outcome; the rest is
        not sent."""
        self._is_over = True
        current = asyncio.current_task()
        for task in self._requests.waiting:
            if task is not current:
                task.cancel()


@contextmanager
def _refusals(body: Object, *, optional: bool = False) -> Iterator[None]:
    """Raises Refused if the cluster does not accept the object."""
    kind, name = body["kind"], body["metadata"]["name"]
    try:
        yield
    except Forbidden as error:
        message = f"the operator may not create {kind} {name}: {_explained(error, body)}"
        obstacle = Obstacle(Reason.NOT_PERMITTED, message)
        raise Refused(obstacle, kind, sure=False) from error
    except InvalidRequest as error:
        message = f"the cluster rejects {kind} {name}: {_explained(error, body)}"
        raise Refused(Obstacle(Reason.INVALID_OBJECT, message), kind) from error
    except NotFound as error:
        if not optional:
            raise
        obstacle = Obstacle(Reason.INVALID_OBJECT, f"the cluster does not know the kind {kind}: {error}")
        raise Refused(obstacle, kind, sure=False) from error


def _explained(error: ApiError, body: Object) -> str:
    """Returns why the cluster refuses the object and, for a pod, what to do about it."""
    refusal = in_one_order(str(error))
    if body["kind"] != "Pod":
        return refusal
    return refusal + (limit_range_remedy(refusal, body) or pod_security_remedy(refusal, body))
