"""Which of several operators works: the one that holds the Lease. The others wait to take over.

The Lease saves work and quarrels; it is not what makes two operators safe. Nothing can be: an operator that was stopped
for a minute still believes that it leads, and its next request is on its way. That the attempt is raised by one write
with the job's resourceVersion as precondition keeps two of them from doing anything twice (`domain.lifecycle.plan`).

So a holder that cannot renew goes on until it sees that another one holds the Lease. While no request gets through it
can do nothing anyway; and where only the API server is slow, an operator that stopped would leave none at work.

As everywhere, a waiting operator does not compare clocks. A Lease that it has seen unchanged for as long as the holder
promised to renew it is free.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

from tpu_training_operator.kube.cluster import LEASES, Object, Resource
from tpu_training_operator.kube.errors import ApiError, Conflict, NotFound

log = logging.getLogger(__name__)

# client-go's numbers. A renewal may take as long as there is time for one.
LEASE_SECONDS = 15
ANSWER_SECONDS = 10.0
RENEW_SECONDS = 2.0
# How soon after a holder's farewell another one begins.
LOOK_SECONDS = 1.0

T = TypeVar("T")


class Leases(Protocol):
    """The part of a cluster that an election needs. Both methods raise ApiErrors."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object: ...

    async def update(self, body: Object) -> Object: ...


@dataclass(frozen=True)
class LeaseName:
    name: str
    namespace: str


@dataclass(frozen=True)
class Sight:
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
        promised = self._spec.get("leaseDurationSeconds") or 0
        return not self.holder or now - self.since > promised

    def taken(self, by: str, at: datetime) -> Object:
        """The Lease that this candidate holds from now on, or holds still."""
        spec, written = dict(self._spec), _micro_time(at)
        if self.holder != by:
            spec["acquireTime"] = written
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        spec |= {"holderIdentity": by, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": written}
        return {**self.lease, "kind": LEASES.kind, "spec": spec}

    def released(self, at: datetime) -> Object:
        """The Lease without a holder. A duration of 0 is not valid."""
        spec = {**self._spec, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro_time(at)}
        return {**self.lease, "kind": LEASES.kind, "spec": spec}


def seen(before: Sight | None, lease: Object, now: float) -> Sight:
    """Only the spec counts: each renewal writes a new time. What others write into the metadata keeps no dead holder
    alive."""
    unchanged = before is not None and before.lease.get("spec") == lease.get("spec")
    return Sight(lease, before.since if before is not None and unchanged else now)


class Election:
    """`identity`: of this process. `clock` is written into the Lease for people; `seconds` are monotonic and count."""

    def __init__(
        self,
        leases: Leases,
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
        self._sight: Sight | None = None
        self._trouble = ""

    async def win(self) -> None:
        """Returns as soon as this process leads."""
        while True:
            if await self._tried(self._take_if_free()):
                break
            await asyncio.sleep(LOOK_SECONDS)
        log.info("this operator leads now: %s", self._identity)

    async def hold(self, work: "asyncio.Future[None]") -> None:
        """Renews the Lease. Returns when another one holds it. Raises what ends `work`, if that fails."""
        renewed = self._seconds()
        while True:
            if work.done():
                work.result()
            began = self._seconds()
            answer = await self._tried(self._renew())
            if answer is False:
                break
            if answer:
                renewed = began
            await asyncio.sleep(RENEW_SECONDS)
        log.warning(
            "this operator no longer leads, and stops working: %s holds the Lease, which this one renewed %.0f s ago",
            self._sight.holder if self._sight else "another one",
            self._seconds() - renewed,
        )

    async def release(self) -> None:
        """Lets another operator take over at once, if this one still holds the Lease."""
        if self._sight is not None and self._sight.holder == self._identity:
            await self._tried(self._write(self._sight.released(self._clock())))

    async def _tried(self, request: Awaitable[T]) -> T | None:
        """What the request returns; None if it failed."""
        try:
            answer = await request
        except Conflict:
            # Somebody else was faster. The next look shows who.
            return None
        except NotFound:
            self._failed(f"Lease {self._name.namespace}/{self._name.name} is missing; `helm upgrade` creates it")
            return None
        except (ApiError, TimeoutError) as error:
            self._failed(f"the Lease cannot be used: {str(error) or 'no answer'}")
            return None
        self._trouble = ""
        return answer

    def _failed(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble

    async def _take_if_free(self) -> bool:
        sight = await self._look()
        # It may be ours, if the answer to an earlier request was lost.
        if not sight.is_free(self._seconds()) and sight.holder != self._identity:
            return False
        await self._write(sight.taken(self._identity, self._clock()))
        return True

    async def _renew(self) -> bool:
        """False if somebody else holds the Lease."""
        sight = self._sight or await self._look()
        try:
            await self._write(sight.taken(self._identity, self._clock()))
        except Conflict:
            # Also an edit of its labels, for example.
            sight = await self._look()
            if sight.holder not in (self._identity, ""):
                return False
            await self._write(sight.taken(self._identity, self._clock()))
        return True

    async def _look(self) -> Sight:
        async with asyncio.timeout(ANSWER_SECONDS):
            lease = await self._leases.get(LEASES, self._name.namespace, self._name.name)
        self._sight = seen(self._sight, lease, self._seconds())
        return self._sight

    async def _write(self, lease: Object) -> None:
        async with asyncio.timeout(ANSWER_SECONDS):
            self._sight = Sight(await self._leases.update(lease), self._seconds())


def _micro_time(at: datetime) -> str:
    """As the API server reads a MicroTime."""
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
