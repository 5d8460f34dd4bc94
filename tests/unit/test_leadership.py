"""Of several operators one works at a time, whatever happens to their requests. In virtual time, on one Lease."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.virtual_time import run
from tpu_training_operator.kube.cluster import Object, Resource
from tpu_training_operator.kube.errors import Conflict, NotFound, Unavailable
from tpu_training_operator.runtime.leadership import LEASE_SECONDS, LOOK_SECONDS, Candidate, Election, LeaseName

NAME = LeaseName("tpu-training-operator", "tpu-system")
EMPTY: Object = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": NAME.name}}
AT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def seconds() -> float:
    return asyncio.get_running_loop().time()


class Server:
    """The API server with one Lease, written over the version that was read, or not at all."""

    def __init__(self) -> None:
        self.lease: Object | None = EMPTY | {"metadata": EMPTY["metadata"] | {"resourceVersion": "1"}}

    def get(self) -> Object:
        if self.lease is None:
            raise NotFound(404, "NotFound", "no such Lease")
        return self.lease

    def put(self, body: Object) -> Object:
        version = self.get()["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            raise Conflict(409, "Conflict", "the object has been modified")
        assert body["spec"]["leaseDurationSeconds"] > 0, "the API server refuses that"
        self.lease = body | {"metadata": body["metadata"] | {"resourceVersion": str(int(version) + 1)}}
        return self.lease


@dataclass
class Line:
    """One candidate's line to the server. `trouble` draws what happens to a request; None: all goes well."""

    server: Server
    trouble: random.Random | None = None

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return await self._request(self.server.get)

    async def update(self, body: Object) -> Object:
        return await self._request(lambda: self.server.put(body))

    async def _request(self, effect: Callable[[], Object]) -> Object:
        what = self.trouble.choice(["fine", "slow", "lost", "answer lost", "late"]) if self.trouble else "fine"
        if what == "lost":
            raise Unavailable(0, "NoAnswer", "reset by peer")
        if what in ("slow", "late"):
            assert self.trouble is not None
            await asyncio.sleep(self.trouble.uniform(0, 2.9 if what == "slow" else 20))
        done = effect()
        if what == "answer lost":
            raise Unavailable(0, "NoAnswer", "reset by peer")
        return done


@dataclass
class Chronicle:
    """Who worked from when to when."""

    terms: list[tuple[str, float, float]] = field(default_factory=list)

    def overlaps(self) -> list[Any]:
        terms = sorted(self.terms, key=lambda term: term[1])
        return [(one, other) for one, other in pairwise(terms) if other[1] < one[2]]


def election(line: Line, name: str) -> Election:
    return Election(line, NAME, Candidate(name, f"{name}:8443"), lambda: AT + timedelta(seconds=seconds()), seconds)


async def forever() -> None:
    await asyncio.Event().wait()


async def takes_part(line: Line, name: str, chronicle: Chronicle) -> None:
    """As a process that is restarted whenever it ends, under another name each time."""
    for life in range(100):
        one = election(line, f"{name}-{life}")
        await one.win()
        began = seconds()
        work = asyncio.ensure_future(forever())
        try:
            await one.hold(work)
        finally:
            chronicle.terms.append((f"{name}-{life}", began, seconds()))
            work.cancel()


async def for_a_while(length: float, *works: Awaitable[None]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.sleep(length)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@given(seeds=st.lists(st.integers(0, 2**32) | st.none(), min_size=2, max_size=3))
def test_no_two_work_at_once_whatever_happens_to_their_requests(seeds: list[int | None]) -> None:
    async def story() -> Chronicle:
        server, chronicle = Server(), Chronicle()
        lines = [Line(server, None if seed is None else random.Random(seed)) for seed in seeds]
        await for_a_while(600, *(takes_part(line, f"operator-{n}", chronicle) for n, line in enumerate(lines)))
        return chronicle

    told = run(story())
    assert told.overlaps() == []
    if None in seeds:
        assert told.terms, "somebody whose requests all go well must come to work"


async def until_the_other_works(ends: Callable[[Election, "asyncio.Task[None]"], Awaitable[None]]) -> float:
    """Seconds from the end of one operator's work to the beginning of the other's."""
    server = Server()
    first, second = election(Line(server), "first"), election(Line(server), "second")
    await first.win()
    holding = asyncio.create_task(first.hold(asyncio.ensure_future(forever())))
    waiting = asyncio.create_task(second.win())
    await asyncio.sleep(60)
    assert not waiting.done()
    assert second.leader_address == "first:8443"
    ended = seconds()
    holding.cancel()
    await ends(first, holding)
    await waiting
    assert server.get()["spec"]["leaseTransitions"] == 2
    return seconds() - ended


def test_after_a_farewell_the_next_one_works_within_a_second() -> None:
    async def released(first: Election, _: object) -> None:
        await first.release()

    assert run(until_the_other_works(released)) <= LOOK_SECONDS


def test_after_a_crash_the_next_one_works_when_the_lease_is_over() -> None:
    async def crashes(_: Election, __: object) -> None:
        pass

    assert run(until_the_other_works(crashes)) <= LEASE_SECONDS + 2 * LOOK_SECONDS


def test_a_holder_whose_lease_was_edited_by_hand_stays() -> None:
    async def story() -> bool:
        server = Server()
        one = election(Line(server), "one")
        await one.win()
        holding = asyncio.create_task(one.hold(asyncio.ensure_future(forever())))
        for label in range(20):
            await asyncio.sleep(1)
            lease = server.get()
            server.put(lease | {"metadata": lease["metadata"] | {"labels": {"edited": str(label)}}})
        return not holding.done()

    assert run(story())


def test_work_that_fails_ends_the_term() -> None:
    async def story() -> None:
        one = election(Line(Server()), "one")
        await one.win()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(OSError("the port is taken"))
        await one.hold(failed)

    with pytest.raises(OSError, match="the port is taken"):
        run(story())


def test_a_missing_lease_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        server = Server()
        server.lease = None
        await for_a_while(60, election(Line(server), "one").win())

    run(story())
    assert [record.message for record in caplog.records] == [
        "Lease tpu-system/tpu-training-operator is missing; `helm upgrade` creates it"
    ]
