"""What lasts: memory with many objects, memory over many jobs, and the start beside jobs that exist."""

import asyncio
import statistics
import time
from collections.abc import Sequence

from bench.scale.audit import OPERATOR as BY_OPERATOR
from bench.scale.audit import counts
from bench.scale.bodies import training_job
from bench.scale.contenders import until_running
from bench.scale.stage import OPERATOR, Object, Stage, jobs_path
from tests.cluster.kwok import finish_pod

_CHURN_JOBS = 8
_SETTLED_SECONDS = 3.0


async def memory_now(stage: Stage) -> Object:
    await stage.audit.quiet(_SETTLED_SECONDS)
    return {"rss": stage.operator.rss_mib, "peak": stage.operator.peak_mib}


async def memory_after_start(stage: Stage) -> Object:
    """Measures a new process that has seen everything there is."""
    stage.operator.stop()
    await stage.audit.quiet()
    stage.operator.start()
    return await memory_now(stage)


async def run_jobs(stage: Stage, jobs: int, hosts: int) -> str:
    """Returns when they run; what their names begin with."""
    run, mark = stage.new_name(), await stage.audit.quiet()
    await stage.client.all("POST", [(jobs_path(OPERATOR), training_job(f"{run}-{i}", hosts)) for i in range(jobs)])
    await stage.until_created(mark, jobs * hosts)
    await until_running(stage, jobs, attempt=1)
    return run


async def start_beside(stage: Stage, jobs: int, hosts: int) -> Object:
    """Starts a new operator where so many jobs run: how long until a pass has seen each, and what it asks for and
    writes."""
    stage.operator.stop()
    mark = await stage.audit.quiet()
    began = time.monotonic()
    stage.operator.start()

    async def seen() -> bool:
        return stage.operator.passes() >= jobs and stage.operator.is_idle()

    await stage.until(seen, f"{jobs} jobs are seen")
    took = time.monotonic() - began
    await stage.audit.quiet(_SETTLED_SECONDS)
    own = [request for request in stage.audit.since(mark) if request.who == BY_OPERATOR]
    counted = {"reads": sum(r.is_read for r in own), "writes": sum(r.is_write for r in own)}
    return {"jobs": jobs, "pods": jobs * hosts, "seconds": took, **counted}


async def undisturbed(stage: Stage, seconds: float) -> dict[str, int]:
    """Counts what the operator asks for and writes, by kind of request, while nothing happens."""
    mark = await stage.audit.quiet()
    await asyncio.sleep(seconds)
    own = [request for request in stage.audit.since(mark) if request.is_read or request.is_write]
    return counts(own).get(BY_OPERATOR, {})


async def finished_jobs(stage: Stage, jobs: int) -> None:
    """So many jobs that have succeeded, without pods. One really did; the others are given its status, while nobody
    looks."""
    done = f"{await run_jobs(stage, 1, 4)}-0"
    for host in range(4):
        finish_pod(stage.cluster, OPERATOR, f"{done}-1-0-{host}", 0, '{"outcome": "Succeeded", "message": ""}')
    path = f"{jobs_path(OPERATOR)}/{done}"

    async def succeeded() -> bool:
        return bool((await stage.client.call("GET", path))["status"]["state"] == "Succeeded")

    await stage.until(succeeded, "the job has succeeded")
    status = (await stage.client.call("GET", path))["status"]
    stage.operator.stop()
    bodies = {f"done-{i}": training_job(f"done-{i}", 4) for i in range(jobs - 1)}
    await stage.client.all("POST", [(jobs_path(OPERATOR), body) for body in bodies.values()])
    made = (await stage.client.call("GET", jobs_path(OPERATOR)))["items"]
    statuses = [
        (f"{jobs_path(OPERATOR)}/{job['metadata']['name']}/status", job | {"status": status})
        for job in made
        if job["metadata"]["name"] in bodies
    ]
    await stage.client.all("PUT", statuses)
    stage.operator.start()


async def churn(stage: Stage, seconds: float) -> Object:
    """Jobs of four hosts come, run and go, a few at a time."""
    began, jobs = time.monotonic(), 0
    rss: list[float] = []
    while time.monotonic() - began < seconds:
        await run_jobs(stage, _CHURN_JOBS, 4)
        await stage.clear(OPERATOR)
        jobs += _CHURN_JOBS
        rss.append(stage.operator.rss_mib)
    return {
        "jobs": jobs,
        "seconds": time.monotonic() - began,
        "rss": rss,
        "kibPerJob": 1024 * slope(rss[len(rss) // 2 :]) / _CHURN_JOBS,
    }


def slope(values: Sequence[float]) -> float:
    """Returns the slope by least squares, per step; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(range(len(values)), values).slope
