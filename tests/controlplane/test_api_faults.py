"""The operator as its own process while its API server misbehaves: a gang starts, and restarts once, all the same.

A proxy injects the faults and counts them: a test whose fault never struck fails. Operators mostly wait until they try
again, so three stages, each with an operator, play at the same time. With SOAK=1 the last tests take half an hour or
more.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import cpu_nodes_for
from tests.cluster.namespaces import emptied_namespace
from tests.controlplane.faults import (
    BROKEN,
    CANNOT_CONVERT,
    CONFLICT,
    CUT_WATCHES,
    EMPTY,
    GONE,
    JOB,
    LISTS,
    REQUESTS,
    SHUTTING_DOWN,
    SLOW_DOWN,
    SOMEBODY_ELSE,
    STATUS,
    TOO_OLD,
    UNAVAILABLE,
    WATCHES,
    Call,
    Effect,
    Entry,
    Fault,
    Hold,
    Reset,
    Say,
    Silence,
    anything,
    is_effect,
    is_read,
    is_status_write,
    on,
)
from tests.controlplane.faulty_proxy import FaultyProxy
from tests.controlplane.gangs import HOSTS, Gang
from tests.controlplane.jobs import Namespace
from tests.controlplane.supervised_operator import SupervisedOperator
from tests.stories import Group, Stories, selected, told_together

SOAK = os.environ.get("SOAK") == "1"
KILLS = 50 if SOAK else 5
ROUNDS = 200 if SOAK else 3

EFFECTS: tuple[Effect, ...] = (
    CONFLICT,
    SLOW_DOWN,
    BROKEN,
    UNAVAILABLE,
    Reset(),
    Reset(after=0),
    Reset(after=30),
    Hold(0.5),
    SOMEBODY_ELSE,
    EMPTY,
    TOO_OLD,
    CANNOT_CONVERT,
)
RANDOM = "one of the faults"


@dataclass(frozen=True)
class Case:
    """`says`: what the log must say about it."""

    name: str
    faults: list[Fault]
    says: str = ""


CASES = (
    # The first on each stage strike no watches: those of an operator that has just started are still being opened.
    Case("answers that break off", on(Reset(after=30), *REQUESTS), "not completed"),
    Case("answers of something that is no API server", on(SOMEBODY_ELSE, *REQUESTS), "Please log in"),
    Case("429 with Retry-After", CUT_WATCHES + on(SLOW_DOWN, *REQUESTS, *WATCHES), "please slow down"),
    Case("500", CUT_WATCHES + on(BROKEN, *REQUESTS, *WATCHES), "leader changed"),
    Case(
        "503 with Retry-After, and new watches that are too old",
        CUT_WATCHES + on(GONE, *WATCHES) + on(SHUTTING_DOWN, ("update", STATUS), ("create", "pods")),
        "shutting down",
    ),
    Case("connections that break before the request", CUT_WATCHES + on(Reset(), *REQUESTS), "reset by peer"),
    Case("answers without content", on(EMPTY, *REQUESTS), "answered with no object"),
    Case("late requests and late answers, and watches that break", CUT_WATCHES + on(Hold(0.3), *REQUESTS)),
    Case(
        "answers that are lost, and watches that end with an error",
        on(Reset(after=0), *REQUESTS) + on(CANNOT_CONVERT, *WATCHES, times=2),
        "cannot convert",
    ),
    Case(
        "an error in one watch while the other cannot be opened",
        on(CANNOT_CONVERT, ("watch", JOB), times=2)
        + on(Reset(), ("watch", "pods"), name="cut ")
        + on(UNAVAILABLE, ("watch", "pods"), times=4),
        "not ready",
    ),
    Case(
        "409 on status writes, and watches that talk nonsense",
        on(CONFLICT, ("update", STATUS), times=3) + on(Say("<html>Please log in"), *WATCHES),
        "the watch was cut off",
    ),
    Case(
        "watches that end as too old, and lists that fail", on(TOO_OLD, *WATCHES) + on(BROKEN, *LISTS), "leader changed"
    ),
)


def must_have_waited(entries: list[Entry]) -> None:
    """No request that was told to wait came back too early."""
    earliest: dict[Call, float] = {}
    for entry in entries:
        assert entry.at >= earliest.get(entry.call, 0), entry
        if entry.told_to_wait:
            earliest[entry.call] = entry.until + entry.told_to_wait


@dataclass
class Stage:
    """An operator behind a proxy of its own: each fault meets an operator that has survived the previous ones.

    gangs: all so far.
    """

    cluster: ControlPlane
    space: Namespace
    proxy: FaultyProxy
    operator: SupervisedOperator
    gangs: list[Gang] = field(default_factory=list)

    def new_gang(self) -> Gang:
        self.gangs.append(Gang(self.space, f"gang{len(self.gangs)}"))
        return self.gangs[-1]


@contextmanager
def a_stage(cluster: ControlPlane, seed: int) -> Iterator[Stage]:
    with emptied_namespace(cluster.api) as name, FaultyProxy(cluster, seed) as proxy:
        operator = SupervisedOperator(cluster, name, proxy.host, proxy.port)
        operator.start()
        try:
            yield Stage(cluster, Namespace(cluster, name), proxy, operator)
        finally:
            operator.stop()


@pytest.fixture(scope="module")
def stages(control_plane: ControlPlane, job_definition: None) -> Iterator[list[Stage]]:
    with cpu_nodes_for(control_plane, STAGES * HOSTS), ExitStack() as playing:
        yield [playing.enter_context(a_stage(control_plane, seed)) for seed in range(STAGES)]


@pytest.fixture(scope="module")
def stories(stages: list[Stage], request: pytest.FixtureRequest) -> Iterator[Stories]:
    """What must happen on the stages, each of which plays some of it."""
    chosen = selected(request, STORIES)
    with told_together(
        *(
            Group({name: partial(STORIES[name], stage) for name in chosen if PLAYS_ON[name] == number})
            for number, stage in enumerate(stages)
        )
    ) as told:
        yield told


@pytest.fixture
def stage(stages: list[Stage], stories: Stories) -> Stage:
    """One of them, for what must happen while the others are quiet."""
    stories.wait()
    return stages[0]


@pytest.fixture
def gang(stage: Stage) -> Gang:
    return stage.new_gang()


@pytest.fixture
def proxy(stage: Stage) -> FaultyProxy:
    return stage.proxy


@pytest.fixture
def operator(stage: Stage) -> SupervisedOperator:
    return stage.operator


def in_spite_of(case: Case, stage: Stage) -> None:
    gang, proxy, operator = stage.new_gang(), stage.proxy, stage.operator
    fired, journal = proxy.fired.copy(), len(proxy.journal)
    exits, log = len(operator.exits), len(operator.log())
    with proxy.misbehaving(*case.faults):
        gang.create()
        gang.wait_until_running(1)
        gang.fail(1)
        gang.wait_until_running(2)

    gang.must_have_restarted(1)
    gang.must_have_been_made_once(proxy)
    assert {fault.name: proxy.fired[fault.name] - fired[fault.name] for fault in case.faults} == {
        fault.name: fault.times for fault in case.faults
    }
    assert case.says in operator.log()[log:]
    assert len(operator.exits) == exits
    must_have_waited(proxy.journal[journal:])


@dataclass(frozen=True)
class Outage:
    """`least`: how many requests it strikes. `says`: what the log must say about it."""

    name: str
    effect: Effect
    least: int
    says: str = ""


OUTAGES = (
    Outage("resets every connection", Reset(), 6, "reset by peer"),
    Outage("is shutting down", UNAVAILABLE, 6, "not ready"),
    # Nothing is retried, so the delayed requests are the only ones.
    Outage("does not answer", Hold(), 2),
)


def after(outage: Outage, stage: Stage) -> None:
    gang, proxy, operator = stage.new_gang(), stage.proxy, stage.operator
    exits, log = len(operator.exits), len(operator.log())
    changes: tuple[Callable[[], None], ...] = (gang.create, lambda: gang.fail(1))
    for attempt, change in enumerate(changes, start=1):
        fault = Fault(f"{outage.name} {attempt}", anything, outage.effect)
        with proxy.misbehaving(*CUT_WATCHES, fault):
            change()
            proxy.wait_until_fired(fault.name, outage.least)
        gang.wait_until_running(attempt)

    gang.must_have_restarted(1)
    gang.must_have_been_made_once(proxy)
    assert outage.says in operator.log()[log:]
    assert len(operator.exits) == exits


def an_operator_whose_token_has_expired_says_so_and_continues_with_the_next(stage: Stage) -> None:
    gang, proxy, operator = stage.new_gang(), stage.proxy, stage.operator
    log, exits = len(operator.log()), len(operator.exits)
    gang.create()
    with operator.token_that_ends() as end_it:
        operator.kill_and_start_again()
        gang.wait_until_running(1)
        end_it()
        with proxy.misbehaving(*CUT_WATCHES):
            gang.fail(1)
            proxy.wait_until_told(401)
    gang.wait_until_running(2)

    gang.must_have_restarted(1)
    gang.must_have_been_made_once(proxy)
    assert "refused the operator's token" in operator.log()[log:]
    assert len(operator.exits) == exits


def an_operator_that_is_killed_again_and_again_loses_no_restart_and_counts_none_twice(stage: Stage) -> None:
    gang, proxy, operator = stage.new_gang(), stage.proxy, stage.operator
    dice = random.Random(7)
    gang.create()
    gang.wait_until_running(1)
    for attempt in range(1, KILLS + 1):
        with proxy.until_requests(dice.randint(1, 20)):
            gang.fail(attempt, host=dice.randrange(HOSTS))
        operator.kill_and_start_again()
        gang.wait_until_running(attempt + 1)

    gang.must_have_restarted(KILLS)
    gang.must_have_been_made_once(proxy)


def two_operators_count_every_restart_once_although_one_is_late(stage: Stage) -> None:
    gang, proxy, restarts = stage.new_gang(), stage.proxy, 4
    with FaultyProxy(stage.cluster, seed=STAGES) as other:
        late = SupervisedOperator(stage.cluster, stage.space.name, other.host, other.port, name="late")
        late.start()
        stale_read, late_write = "stale read", "late create or delete"
        with other.misbehaving(
            Fault(stale_read, is_read, Hold(0.2), share=0.5), Fault(late_write, is_effect, Hold(0.5), share=0.4)
        ):
            gang.create()
            for attempt in range(1, restarts + 1):
                gang.wait_until_running(attempt)
                decision = f"the decision of restart {attempt}"
                held = Fault(decision, is_status_write, Hold())
                # Both decide on the same read; one writes its decision, then the other tries.
                first, second = (proxy, other) if attempt % 2 else (other, proxy)
                refused = second.number_taken(409, is_status_write)
                with second.misbehaving(held):
                    with first.misbehaving(held):
                        gang.fail(attempt)
                        for each in (first, second):
                            each.wait_until_fired(decision, 1)
                    gang.wait_until_running(attempt + 1)
                second.wait_until_taken(409, is_status_write, refused + 1)
        late.stop()

    gang.must_have_restarted(restarts)
    assert other.fired[stale_read]
    assert other.fired[late_write]


# In the order of their lengths, so that the stages end together.
OTHERS: tuple[Callable[[Stage], None], ...] = (
    an_operator_whose_token_has_expired_says_so_and_continues_with_the_next,
    an_operator_that_is_killed_again_and_again_loses_no_restart_and_counts_none_twice,
    two_operators_count_every_restart_once_although_one_is_late,
)
STAGES = 3
STORIES: dict[str, Callable[[Stage], None]] = (
    {outage.name: partial(after, outage) for outage in OUTAGES}
    | {other.__name__: other for other in OTHERS}
    | {case.name: partial(in_spite_of, case) for case in CASES}
)
# The first stage has the outages, which are mostly waited for.
PLAYS_ON = (
    {outage.name: 0 for outage in OUTAGES}
    | {other.__name__: number for number, other in enumerate(OTHERS)}
    | {case.name: 1 + index % 2 for index, case in enumerate(CASES)}
)


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_a_gang_starts_and_restarts_once_in_spite_of(case: str, stories: Stories) -> None:
    stories.end_of(case)


@pytest.mark.parametrize("outage", [outage.name for outage in OUTAGES])
def test_a_gang_starts_and_restarts_once_after_an_api_server_that(outage: str, stories: Stories) -> None:
    stories.end_of(outage)


@pytest.mark.parametrize("story", [story.__name__ for story in OTHERS])
def test_that(story: str, stories: Stories) -> None:
    stories.end_of(story)


def test_an_api_server_that_restarts_during_a_restart_of_the_gang_changes_nothing(
    control_plane: ControlPlane, gang: Gang, proxy: FaultyProxy, operator: SupervisedOperator
) -> None:
    exits = len(operator.exits)
    gang.create()
    gang.wait_until_running(1)
    lost = Fault("the new attempt is written, and its answer is lost", is_status_write, Reset(after=0), times=1)
    with proxy.misbehaving(lost):
        gang.fail(1)
        proxy.wait_until_fired(lost.name, 1)
        control_plane.restart_apiserver()
    gang.wait_until_running(2)

    gang.must_have_restarted(1)
    gang.must_have_been_made_once(proxy)
    assert len(operator.exits) == exits


def test_under_faults_at_random_every_restart_is_counted_once(
    gang: Gang, proxy: FaultyProxy, operator: SupervisedOperator
) -> None:
    dice = random.Random(3)
    gang.create()
    gang.wait_until_running(1)
    for attempt in range(1, ROUNDS + 1):
        chosen = [Fault(RANDOM, anything, effect, share=0.3) for effect in dice.sample(EFFECTS, 3)]
        with proxy.misbehaving(*chosen):
            gang.fail(attempt, host=dice.randrange(HOSTS))
            proxy.wait_until_fired(RANDOM, attempt)
        gang.wait_until_running(attempt + 1, timeout=240)

    gang.must_have_restarted(ROUNDS)
    gang.must_have_been_made_once(proxy)


@pytest.mark.skipif(not SOAK, reason="takes minutes: make soak")
def test_watches_that_fall_silent_are_reopened(gang: Gang, proxy: FaultyProxy, operator: SupervisedOperator) -> None:
    exits = len(operator.exits)
    gang.create()
    gang.wait_until_running(1)
    with proxy.misbehaving(*on(Silence(), *WATCHES, name="silent ")):
        gang.fail(1)
    gang.wait_until_running(2, timeout=240)

    gang.must_have_restarted(1)
    gang.must_have_been_made_once(proxy)
    assert len(operator.exits) == exits


@pytest.mark.skipif(not SOAK, reason="takes minutes: make soak")
@pytest.mark.parametrize(("effect", "requests"), [(UNAVAILABLE, 40), (Reset(), 40), (Hold(), 6)])
def test_an_outage_of_minutes_does_not_end_the_operator(
    effect: Effect, requests: int, gang: Gang, proxy: FaultyProxy, operator: SupervisedOperator
) -> None:
    exits = len(operator.exits)
    gang.create()
    gang.wait_until_running(1)
    outage = Fault(f"long {effect}", anything, effect)
    with proxy.misbehaving(*CUT_WATCHES, outage):
        gang.fail(1)
        proxy.wait_until_fired(outage.name, requests, timeout=600)
    gang.wait_until_running(2, timeout=240)

    gang.must_have_restarted(1)
    gang.must_have_been_made_once(proxy)
    assert len(operator.exits) == exits


def test_settled_jobs_cause_no_status_writes(stages: list[Stage], stories: Stories) -> None:
    stories.wait()
    before = [[gang.resource_version() for gang in stage.gangs] for stage in stages]
    # Once an operator has started another job, it has reconciled these, too.
    later = [Gang(stage.space, "later") for stage in stages]
    for stage, gang in zip(stages, later, strict=True):
        stage.operator.kill_and_start_again()
        gang.create()
    for gang in later:
        gang.wait_until_running(1)

    assert [[gang.resource_version() for gang in stage.gangs] for stage in stages] == before
