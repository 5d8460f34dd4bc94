"""What a gang costs the API server, and how that grows with the gang. Counts only: seconds are for `make bench`."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from bench.scale.audit import Cost
from bench.scale.contenders import operator
from bench.scale.lasting import run_jobs, start_beside, undisturbed
from bench.scale.stage import OPERATOR, Stage, a_stage

SMALL, LARGE = 4, 64
JOBS = 20
# The first attempt: Service, ConfigMap, NetworkPolicy, the addresses in two forms, two statuses. A restart keeps the
# first and the third, replaces the Endpoints, and deletes the old ConfigMap and EndpointSlice.
MOST_OTHER_WRITES = {"create": 7, "restart": 7}
# Fresh looks at the job and its gang, at the gang alone, and at the job alone. A restart also looks at what exists
# already: Service, NetworkPolicy and Endpoints.
MOST_READS = {"create": 4, "restart": 8}
# Attempts begin, and run.
MOST_EVENTS = 2
STEADY_SECONDS = 10.0


@dataclass(frozen=True)
class Attempt:
    """What the attempts of so many jobs took. `requests`: everybody's, for the message of a failed test."""

    name: str
    kind: str
    jobs: int
    hosts: int
    cost: Cost
    requests: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    attempts: dict[str, Attempt]
    steady: dict[str, int]
    start: dict[str, Any]


@pytest.fixture(scope="module")
def measured() -> Measured:
    return asyncio.run(_measure())


async def _measure() -> Measured:
    async with a_stage(4 * LARGE) as stage:
        attempts = [
            each for jobs, hosts in ((1, SMALL), (1, LARGE), (JOBS, SMALL)) for each in await _run(stage, jobs, hosts)
        ]
        await run_jobs(stage, 1, LARGE)
        steady = await undisturbed(stage, STEADY_SECONDS)
        await stage.clear(OPERATOR)
        await run_jobs(stage, JOBS, SMALL)
        start = await start_beside(stage, JOBS, SMALL)
    return Measured({each.name: each for each in attempts}, steady, start)


async def _run(stage: Stage, jobs: int, hosts: int) -> list[Attempt]:
    run = await operator(stage, jobs, hosts, restart=jobs == 1)
    await stage.clear(OPERATOR)
    name = f"{hosts} hosts" if jobs == 1 else f"{jobs} jobs"
    return [
        Attempt(f"{kind} {name}", kind, jobs, hosts, Cost(**run.more[kind]["cost"]), run.more[kind]["requests"])
        for kind in ("create", "restart")
        if kind in run.more
    ]


GANGS = [f"{kind} {hosts} hosts" for hosts in (SMALL, LARGE) for kind in ("create", "restart")]
ATTEMPTS = pytest.mark.parametrize("name", [*GANGS, f"create {JOBS} jobs"])


@pytest.fixture
def attempt(measured: Measured, name: str) -> Attempt:
    return measured.attempts[name]


@ATTEMPTS
def test_every_worker_is_created_once(attempt: Attempt) -> None:
    created, wanted = attempt.cost.creates, attempt.jobs * attempt.hosts
    assert created == wanted, attempt.requests


@ATTEMPTS
def test_an_attempt_takes_few_other_writes_whatever_its_size(attempt: Attempt) -> None:
    deletions = attempt.hosts if attempt.kind == "restart" else 0
    writes, most = attempt.cost.other_writes - deletions, attempt.jobs * MOST_OTHER_WRITES[attempt.kind]
    assert writes <= most, attempt.requests["operator"]


@ATTEMPTS
def test_an_attempt_takes_few_reads_whatever_its_size(attempt: Attempt) -> None:
    reads, most = attempt.cost.reads, attempt.jobs * MOST_READS[attempt.kind]
    assert reads <= most, attempt.requests["operator"]


@ATTEMPTS
def test_an_attempt_tells_of_its_beginning_and_of_its_run(attempt: Attempt) -> None:
    assert attempt.cost.events <= attempt.jobs * MOST_EVENTS, attempt.requests["operator"]


@ATTEMPTS
def test_endpoints_are_written_a_handful_of_times_by_anybody(attempt: Attempt) -> None:
    """In two forms. A restart deletes one, and replaces the other."""
    writes, most = attempt.cost.endpoint_writes, attempt.jobs * (2 if attempt.kind == "create" else 3)
    assert writes <= most, attempt.requests


def test_a_gang_that_runs_costs_nothing(measured: Measured) -> None:
    assert measured.steady == {}


def test_an_operator_that_starts_beside_jobs_writes_nothing(measured: Measured) -> None:
    assert measured.start["writes"] == 0
