"""What gangs of several sizes ask of the API server: measured on a control plane of its own, beside the other tests."""

import asyncio
from dataclasses import dataclass
from typing import Any

from bench.scale.audit import Cost
from bench.scale.contenders import operator
from bench.scale.lasting import start_beside, undisturbed
from bench.scale.stage import OPERATOR, Stage, a_stage

SMALL, LARGE = 4, 32
JOBS = 10
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


def measure() -> Measured:
    """Takes more than a minute, most of which it waits until nobody asks for anything any more."""
    return asyncio.run(_measure())


async def _measure() -> Measured:
    async with a_stage(2 * LARGE, with_job_sets=False) as stage:
        small = await _run(stage, 1, SMALL)
        await stage.clear(OPERATOR)
        many = await _run(stage, JOBS, SMALL)
        start = await start_beside(stage, JOBS, SMALL)
        await stage.clear(OPERATOR)
        large = await _run(stage, 1, LARGE)
        steady = await undisturbed(stage, STEADY_SECONDS)
    return Measured({each.name: each for each in (*small, *many, *large)}, steady, start)


async def _run(stage: Stage, jobs: int, hosts: int) -> list[Attempt]:
    """The jobs run on."""
    run = await operator(stage, jobs, hosts, restart=jobs == 1)
    name = f"{hosts} hosts" if jobs == 1 else f"{jobs} jobs"
    return [
        Attempt(f"{kind} {name}", kind, jobs, hosts, Cost(**run.more[kind]["cost"]), run.more[kind]["requests"])
        for kind in ("create", "restart")
        if kind in run.more
    ]
