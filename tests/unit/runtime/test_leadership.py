"""Of several operators one works, whatever happens to their requests. In virtual time, on one Lease."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.fakes.cluster import FakeCluster
from tests.unit.virtual_time import run
from tpu_training_operator.kube.cluster import LEASES, Object, Resource
from tpu_training_operator.kube.errors import Unavailable
from tpu_training_operator.runtime.leadership import LEASE_SECONDS, LOOK_SECONDS, Election, LeaseName

NAME = LeaseName("tpu-training-operator", "tpu-system")
EMPTY: Object = {
    "apiVersion": LEASES.api_version,
    "kind": LEASES.kind,
    "metadata": {"name": NAME.name, "namespace": NAME.namespace},
}
AT = datetime(2026, 3, 1, 12, tzinfo=UTC)


def seconds() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Line:
    """One candidate's line to the cluster. `trouble` draws what happens to a request; None: all goes well, after
    `delay` seconds. `looks`: when each look began that was answered. `cut_until`: no request gets through."""

    cluster: FakeCluster
    trouble: random.Random | None = None
    delay: float = 0.0
    cut_until: float = 0.0
    looks: list[float] = field(default_factory=list)

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        began = seconds()
        lease = await self._request(lambda: self.cluster.get(resource, namespace, name))
        self.looks.append(began)
        return lease

    async def update(self, body: Object) -> Object:
        assert body["spec"]["leaseDurationSeconds"] > 0, "the API server refuses that"
        return await self._request(lambda: self.cluster.update(body))

    async def _request(self, effect: Callable[[], Awaitable[Object]]) -> Object:
        await asyncio.sleep(max(self.delay, self.cut_until - seconds()))
        what = self.trouble.choice(["fine", "slow", "lost", "answer lost", "late"]) if self.trouble else "fine"
        if what == "lost":
            raise Unavailable(0, "NoAnswer", "reset by peer")
        if what in ("slow", "late"):
            await asyncio.sleep(self.trouble.uniform(0, 2.9 if what == "slow" else 20))
        lease = await effect()
        if what == "answer lost":
            raise Unavailable(0, "NoAnswer", "reset by peer")
        return lease


@dataclass(frozen=True)
class Term:
    """One operator's work, from when to when."""

    line: Line
    began: float
    ended: float


def election(line: Line, name: str) -> Election:
    return Election(line, NAME, name, lambda: AT + timedelta(seconds=seconds()), seconds)


def stored_in(cluster: FakeCluster) -> Object:
    return cluster.body(LEASES, NAME.name, NAME.namespace)


def edit(cluster: FakeCluster, **metadata: dict[str, str]) -> None:
    lease = stored_in(cluster)
    cluster.put(lease | {"metadata": lease["metadata"] | metadata})


async def forever() -> None:
    await asyncio.Event().wait()


async def takes_part(line: Line, name: str, terms: list[Term]) -> None:
    """As a process that is restarted whenever it ends, under another name each time."""
    for life in range(100):
        one = election(line, f"{name}-{life}")
        await one.win()
        began = seconds()
        work = asyncio.ensure_future(forever())
        try:
            await one.hold(work)
        finally:
            terms.append(Term(line, began, seconds()))
            work.cancel()


async def for_a_while(length: float, *works: Awaitable[None]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.sleep(length)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@settings(max_examples=50)
@given(seeds=st.lists(st.integers(0, 2**32) | st.none(), min_size=2, max_size=3))
def test_an_operator_stops_at_its_first_look_at_the_lease_of_another(seeds: list[int | None]) -> None:
    """Whatever happens to their requests. Until it has seen that, two may work, which is safe."""

    async def story() -> list[Term]:
        cluster, terms = FakeCluster(EMPTY), list[Term]()
        lines = [Line(cluster, None if seed is None else random.Random(seed)) for seed in seeds]
        await for_a_while(600, *(takes_part(line, f"operator-{n}", terms) for n, line in enumerate(lines)))
        return terms

    terms = run(story())
    for one, other in permutations(terms, 2):
        overlap = min(one.ended, other.ended)
        if one.began < other.began < overlap:
            assert sum(other.began < look < overlap for look in one.line.looks) <= 1
    if None in seeds:
        assert terms, "an operator whose requests all go well must come to work"


@pytest.mark.parametrize("delay", [0.0, 1.0, 3.3, 6.5])
def test_behind_a_slow_api_server_one_leads_and_stays_the_leader(delay: float) -> None:
    async def story() -> list[Term]:
        cluster, terms = FakeCluster(EMPTY), list[Term]()
        await for_a_while(900, *(takes_part(Line(cluster, delay=delay), name, terms) for name in ("one", "two")))
        return terms

    [term] = run(story())
    assert term.began <= 2 * delay + LOOK_SECONDS
    assert term.ended == 900


@pytest.mark.parametrize("others", [0, 1])
def test_after_a_minute_without_requests_it_goes_on_unless_another_one_leads(
    others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the process gets no processor time, or the network is cut."""

    async def story() -> bool:
        cluster = FakeCluster(EMPTY)
        cut = Line(cluster)
        one = election(cut, "one")
        await one.win()
        holding = asyncio.create_task(one.hold(asyncio.ensure_future(forever())))
        waiting = [asyncio.create_task(election(Line(cluster), "other").win()) for _ in range(others)]
        await asyncio.sleep(10)
        cut.cut_until = seconds() + 60
        await asyncio.sleep(90)
        for task in waiting:
            task.cancel()
        return holding.done()

    stops = run(story())
    assert stops == bool(others)
    said = [record.message for record in caplog.records if "no longer leads" in record.message]
    assert len(said) == others
    assert all("other holds the Lease" in text for text in said)


async def until_the_other_works(ends: Callable[[Election, "asyncio.Task[None]"], Awaitable[None]]) -> float:
    """Seconds from the end of one operator's work to the beginning of the other's."""
    cluster = FakeCluster(EMPTY)
    first, second = election(Line(cluster), "first"), election(Line(cluster), "second")
    await first.win()
    holding = asyncio.create_task(first.hold(asyncio.ensure_future(forever())))
    waiting = asyncio.create_task(second.win())
    await asyncio.sleep(60)
    assert not waiting.done()
    ended = seconds()
    holding.cancel()
    await ends(first, holding)
    await waiting
    assert stored_in(cluster)["spec"]["leaseTransitions"] == 2
    return seconds() - ended


def test_after_a_farewell_the_next_one_works_within_a_second() -> None:
    async def released(first: Election, _: object) -> None:
        await first.release()

    assert run(until_the_other_works(released)) <= LOOK_SECONDS


def test_after_a_crash_the_next_one_works_when_the_lease_is_over() -> None:
    async def crashes(_: Election, __: object) -> None:
        pass

    assert run(until_the_other_works(crashes)) <= LEASE_SECONDS + 2 * LOOK_SECONDS


def test_what_others_write_into_a_lease_keeps_no_dead_holder_alive() -> None:
    async def story() -> float:
        cluster = FakeCluster(EMPTY)
        await election(Line(cluster), "dead").win()
        waiting = asyncio.create_task(election(Line(cluster), "second").win())
        began = seconds()
        while not waiting.done() and seconds() < began + 60:
            await asyncio.sleep(5)
            edit(cluster, annotations={"seen": str(seconds())})
        waiting.cancel()
        return seconds() - began

    assert run(story()) <= LEASE_SECONDS + 5 + 2 * LOOK_SECONDS


def test_a_holder_whose_lease_was_edited_by_hand_stays() -> None:
    async def story() -> bool:
        cluster = FakeCluster(EMPTY)
        one = election(Line(cluster), "one")
        await one.win()
        holding = asyncio.create_task(one.hold(asyncio.ensure_future(forever())))
        for label in range(20):
            await asyncio.sleep(1)
            edit(cluster, labels={"edited": str(label)})
        return not holding.done()

    assert run(story())


def test_work_that_fails_ends_the_term() -> None:
    async def story() -> None:
        one = election(Line(FakeCluster(EMPTY)), "one")
        await one.win()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(OSError("the port is taken"))
        await one.hold(failed)

    with pytest.raises(OSError, match="the port is taken"):
        run(story())


def test_a_missing_lease_is_told_once(caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion) -> None:
    async def story() -> None:
        await for_a_while(60, election(Line(FakeCluster()), "one").win())

    run(story())
    [record] = caplog.records
    assert "tpu-system/tpu-training-operator" in record.message
    assert record.message == snapshot
