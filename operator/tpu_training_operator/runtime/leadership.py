"""Leader election: of several operators, the one that holds the Lease works, and the others wait to take over.

The Lease saves work; it does not make two operators safe, and cannot: an operator that was stopped for a minute still
believes that it leads, and its next request is on its way. Two operators do nothing twice because the attempt is raised
by one write with the job's resourceVersion as precondition (`domain.plan.planner`).

So a holder that cannot renew the Lease continues until it sees that another one holds it. While no request gets
through, it can do nothing anyway; and if the API server is only slow, there would be no operator at work otherwise.

A waiting operator does not compare clocks. A Lease is free if it has not changed for as long as its holder promised to
renew it.

The operator that leads labels its own pod, by which the Service for progress reports finds it. A waiting operator is
ready, too: a rollout, a PodDisruptionBudget and `helm --wait` count ready pods.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from tpu_training_operator.kube.client import Client
from tpu_training_operator.kube.cluster import LEASES, PODS, Object, Updater
from tpu_training_operator.kube.errors import ApiError, Conflict, NotFound, Unavailable

log = logging.getLogger(__name__)

# client-go's numbers.
LEASE_SECONDS = 15
ANSWER_SECONDS = 10.0
RENEW_SECONDS = 2.0
# Between two looks of a waiting operator.
LOOK_SECONDS = 1.0

LABEL_LEADS = "tpu-operator.dev/leads"
_RETRY_SECONDS = 2.0
_LABEL_SECONDS = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class LeaseName:
    name: str
    namespace: str


@dataclass(frozen=True)
class LeaseView:
    """The Lease as it was when it last changed, and when that was seen, in monotonic seconds."""

    lease: Object
    since: float

    @property
    def holder(self) -> str:
        return str(self._spec.get("holderIdentity") or "")

    @property
    def _spec(self) -> Object:
        return self.lease.get("spec") or {}

    def is_free(self, now: float) -> bool:
        duration = self._spec.get("leaseDurationSeconds") or 0
        return not self.holder or now - self.since > duration

    def with_holder(self, identity: str, now: datetime) -> Object:
        """Returns the Lease as this candidate takes or renews it."""
        spec, time = dict(self._spec), _micro_time(now)
        if self.holder != identity:
            spec["acquireTime"] = time
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        spec |= {"holderIdentity": identity, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": time}
        return {**self.lease, "kind": LEASES.kind, "spec": spec}

    def without_holder(self, now: datetime) -> Object:
        """Returns the Lease as its holder gives it up."""
        # A duration of 0 is not valid.
        spec = {**self._spec, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro_time(now)}
        return {**self.lease, "kind": LEASES.kind, "spec": spec}


def update_view(before: LeaseView | None, lease: Object, now: float) -> LeaseView:
    """Returns the view after the Lease was read. Only a new spec is a change: each renewal writes a new time there, and
    an edit of the metadata must not keep a dead holder alive."""
    unchanged = before is not None and before.lease.get("spec") == lease.get("spec")
    return LeaseView(lease, before.since if before is not None and unchanged else now)


class Election:
    """`identity`: of this process. `clock`: the times in the Lease, for people. `seconds`: monotonic, for decisions."""

    def __init__(
        self,
        leases: Updater,
        name: LeaseName,
        identity: str,
        clock: Callable[[], datetime],
        seconds: Callable[[], float],
    ) -> None:
        self._leases = leases
        self._name = name
        self._identity = identity
        self._clock = clock
        self._seconds = seconds
        self._view: LeaseView | None = None
        self._trouble = ""

    async def win(self) -> None:
        """Returns as soon as this process leads."""
        while True:
            if await self._try(self._take_if_free()):
                break
            await asyncio.sleep(LOOK_SECONDS)
        log.info("this operator leads now: %s", self._identity)

    async def hold(self, work: "asyncio.Future[None]") -> None:
        """Renews the Lease until another one holds it. Raises the error of `work` if that fails."""
        renewed = self._seconds()
        while True:
            if work.done():
                work.result()
            began = self._seconds()
            answer = await self._try(self._renew())
            if answer is False:
                break
            if answer:
                renewed = began
            await asyncio.sleep(RENEW_SECONDS)
        log.warning(
            "this operator no longer leads, and stops working: %s holds the Lease, which this one renewed %.0f s ago",
            self._view.holder if self._view else "another one",
            self._seconds() - renewed,
        )

    async def release(self) -> None:
        """Lets another operator take over at once, if this one still holds the Lease."""
        if self._view is not None and self._view.holder == self._identity:
            await self._try(self._write(self._view.without_holder(self._clock())))

    async def _try(self, request: Awaitable[T]) -> T | None:
        """Returns the answer; None if the request failed."""
        try:
            answer = await request
        except Conflict:
            # Another operator was faster. The next look shows which one.
            return None
        except NotFound:
            self._log_trouble(f"Lease {self._name.namespace}/{self._name.name} is missing; `helm upgrade` creates it")
            return None
        except (ApiError, TimeoutError) as error:
            self._log_trouble(f"the Lease cannot be used: {str(error) or 'no answer'}")
            return None
        self._trouble = ""
        return answer

    def _log_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble

    async def _take_if_free(self) -> bool:
        view = await self._look()
        # It may be ours, if the answer to an earlier request was lost.
        if not view.is_free(self._seconds()) and view.holder != self._identity:
            return False
        await self._write(view.with_holder(self._identity, self._clock()))
        return True

    async def _renew(self) -> bool:
        """Returns False if another one holds the Lease."""
        view = self._view or await self._look()
        try:
            await self._write(view.with_holder(self._identity, self._clock()))
        except Conflict:
            # It may be an edit of the labels, for example.
            view = await self._look()
            if view.holder not in (self._identity, ""):
                return False
            await self._write(view.with_holder(self._identity, self._clock()))
        return True

    async def _look(self) -> LeaseView:
        async with asyncio.timeout(ANSWER_SECONDS):
            lease = await self._leases.get(LEASES, self._name.namespace, self._name.name)
        self._view = update_view(self._view, lease, self._seconds())
        return self._view

    async def _write(self, lease: Object) -> None:
        async with asyncio.timeout(ANSWER_SECONDS):
            self._view = LeaseView(await self._leases.update(lease), self._seconds())


def _micro_time(at: datetime) -> str:
    """Formats a MicroTime."""
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True)
class OwnPod:
    """The pod of this process. An earlier process in it may have been killed while it led, and left the label."""

    pods: Client
    namespace: str
    name: str

    async def keep_label(self) -> None:
        """Sets the label again and again: an edit may remove it, and a refusal may be temporary."""
        while True:
            await self.set_label(leads=True)
            await asyncio.sleep(_LABEL_SECONDS)

    async def set_label(self, *, leads: bool) -> None:
        """Sets or removes the label. Returns when the API server has done so or has refused."""
        body = {"metadata": {"labels": {LABEL_LEADS: "true" if leads else None}}}
        while True:
            try:
                await self.pods.patch(PODS, self.namespace, self.name, body)
                return
            except Unavailable as error:
                log.warning("the operator's pod cannot be labelled yet: %s", error)
            except ApiError as error:
                where = f"{self.namespace}/{self.name}"
                log.error(
                    "workers cannot report, because pod %s cannot get the label %s: %s", where, LABEL_LEADS, error
                )
                return
            await asyncio.sleep(_RETRY_SECONDS)
