"""What is timed: each contender starts gangs of the same pods, and all but the plain Indexed Job replace one gang after
a failure. What they made is left for the caller to clear.

Times come from the audit log: from the moment the API server received the first request until it had answered the last
creation. What the client itself needs before and after is nobody's cost.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.scale.audit import Cost, Request, counts
from bench.scale.bodies import bare_pods, indexed_job, job_set, training_job, worker_pods
from bench.scale.stage import (
    BARE,
    FLOOR,
    INDEXED,
    JOBSET,
    OPERATOR,
    Object,
    Stage,
    batch_path,
    job_sets_path,
    jobs_path,
    pods_path,
)
from tests.cluster.kwok import finish_pod

KILLED = 137
# From the name of a run, hosts, namespace, owner and attempt.
Pods = Callable[[str, int, str, Object, int], list[Object]]


@dataclass(frozen=True)
class Run:
    """One contender's run in one round. Seconds; `restart` is None if it has none. `jobs` of `hosts` each."""

    jobs: int
    hosts: int
    create: float
    restart: float | None = None
    more: dict[str, Any] = field(default_factory=dict)


def span(requests: Sequence[Request], first: Request) -> float:
    """Until the last of the pods' creations was answered."""
    return max(request.answered for request in requests if request.creates_pod) - first.asked


async def floor(stage: Stage, jobs: int, hosts: int, restart: bool) -> Run:
    """Runs the bare client with the operator's own bodies."""
    return await _bare_client(stage, FLOOR, worker_pods, jobs, hosts, restart)


async def bare(stage: Stage, jobs: int, hosts: int, restart: bool) -> Run:
    """Runs the bare client with the smallest bodies."""
    return await _bare_client(stage, BARE, bare_pods, jobs, hosts, restart)


async def _bare_client(stage: Stage, place: str, make: Pods, jobs: int, hosts: int, restart: bool) -> Run:
    """POSTs of the pods; for the restart one DELETE of the collection and the POSTs again."""
    run = stage.new_name()
    owner = await stage.client.call("POST", f"/api/v1/namespaces/{place}/configmaps", {"metadata": {"name": run}})

    def calls(attempt: int) -> list[tuple[str, Object | None]]:
        bodies = (make(f"{run}-{job}", hosts, place, owner, attempt) for job in range(jobs))
        return [(pods_path(place), pod) for pods in bodies for pod in pods]

    # Built before the clock starts.
    first, second = calls(1), calls(2) if restart else []
    mark = await stage.audit.quiet()
    await stage.client.all("POST", first)
    asked = await _own(stage, place, mark, jobs * hosts)
    created = span(asked, next(request for request in asked if request.creates_pod))
    restarted = None
    if restart:
        mark = await stage.audit.quiet()
        await stage.client.call("DELETE", pods_path(place))
        await stage.client.all("POST", second)
        asked = await _own(stage, place, mark, jobs * hosts)
        restarted = span(asked, next(request for request in asked if request.verb == "deletecollection"))
    return Run(jobs, hosts, created, restarted)


async def _own(stage: Stage, place: str, mark: int, pods: int) -> list[Request]:
    await stage.until_created(mark, pods)
    return [request for request in stage.audit.since(mark) if request.who == "admin" and request.namespace == place]


async def indexed(stage: Stage, jobs: int, hosts: int, restart: bool) -> Run:
    """Plain Indexed Jobs. They have no restart of a gang."""
    run = stage.new_name()
    template = worker_pods(run, hosts, INDEXED, {"metadata": {"name": "none", "uid": "none"}})
    mark = await stage.audit.quiet()
    bodies = [(batch_path(INDEXED), indexed_job(f"{run}-{job}", template)) for job in range(jobs)]
    await stage.client.all("POST", bodies)
    await stage.until_created(mark, jobs * hosts)
    asked = stage.audit.since(mark)
    created = span(asked, next(request for request in asked if request.label == "create jobs"))
    return Run(jobs, hosts, created)


async def jobset(stage: Stage, jobs: int, hosts: int, restart: bool) -> Run:
    """Runs JobSets, each of one Indexed Job, with JobSet's own restart of the gang."""
    assert stage.job_sets is not None
    run = stage.new_name()
    template = worker_pods(run, hosts, JOBSET, {"metadata": {"name": "none", "uid": "none"}})
    with stage.job_sets.running():
        mark = await stage.audit.quiet()
        bodies = [(job_sets_path(JOBSET), job_set(f"{run}-{job}", template)) for job in range(jobs)]
        await stage.client.all("POST", bodies)
        await stage.until_created(mark, jobs * hosts)
        end = await stage.audit.quiet()
        asked = stage.audit.requests[mark:end]
        created = span(asked, next(request for request in asked if request.label == "create jobsets"))
        restarted = None
        if restart:
            pods = (await stage.client.call("GET", pods_path(JOBSET)))["items"]
            await asyncio.to_thread(finish_pod, stage.cluster, JOBSET, pods[hosts // 2]["metadata"]["name"], KILLED)
            await stage.until_created(end, hosts)
            asked = stage.audit.since(end)
            restarted = span(asked, next(request for request in asked if request.label == "patch pods/status"))
    return Run(jobs, hosts, created, restarted)


async def operator(stage: Stage, jobs: int, hosts: int, restart: bool) -> Run:
    """This operator. `more`: what it took of the API server and of the processor."""
    more: dict[str, Any] = {}
    run = stage.new_name()
    mark, cpu, waits = await stage.audit.quiet(), stage.operator.cpu_seconds, stage.operator.waits()
    bodies = [(jobs_path(OPERATOR), training_job(f"{run}-{job}", hosts)) for job in range(jobs)]
    await stage.client.all("POST", bodies)
    await stage.until_created(mark, jobs * hosts)
    await until_running(stage, jobs, attempt=1)
    end = await stage.audit.quiet()
    asked = stage.audit.requests[mark:end]
    begun = [request for request in asked if request.label == "create tputrainingjobs"]
    created = span(asked, begun[0])
    more["create"] = _account(stage, asked, cpu, jobs * hosts)
    more["firstPod"] = percentile(_to_first_pods(asked, begun), 0.99)
    more["hintToPass"] = quantile(_less(stage.operator.waits(), waits), 0.99)
    restarted = None
    if restart:
        cpu = stage.operator.cpu_seconds
        failing = f"{run}-0-1-0-{hosts // 2}"
        await asyncio.to_thread(finish_pod, stage.cluster, OPERATOR, failing, KILLED)
        await stage.until_created(end, hosts)
        await until_running(stage, 1, attempt=2)
        last = await stage.audit.quiet()
        asked = stage.audit.requests[end:last]
        restarted = span(asked, next(request for request in asked if request.label == "patch pods/status"))
        more["restart"] = _account(stage, asked, cpu, hosts)
    return Run(jobs, hosts, created, restarted, more)


def _account(stage: Stage, asked: Sequence[Request], cpu: float, pods: int) -> Object:
    per_host = 1000 * (stage.operator.cpu_seconds - cpu) / pods
    return {"cost": asdict(Cost.of(asked)), "requests": counts(asked), "cpuMsPerHost": per_host}


async def until_running(stage: Stage, jobs: int, attempt: int) -> None:
    async def running() -> bool:
        # Not while pods start: a list of a thousand jobs costs the API server more than they do.
        await stage.audit.quiet()
        found = (await stage.client.call("GET", jobs_path(OPERATOR)))["items"]
        states = [(job.get("status", {}).get("state"), job.get("status", {}).get("attempt")) for job in found]
        return states.count(("Running", attempt)) == jobs

    await stage.until(running, f"{jobs} jobs run in attempt {attempt}")


def _to_first_pods(asked: Sequence[Request], begun: Sequence[Request]) -> list[float]:
    """Seconds from each job's creation until its first pod exists."""
    first: dict[str, float] = {}
    for request in asked:
        if request.creates_pod:
            first.setdefault(request.name.rsplit("-", 3)[0], request.answered)
    return [first[request.name] - request.asked for request in begun]


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that is not exceeded by so large a share of them."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def quantile(cumulated: dict[str, float], share: float) -> float | None:
    """Returns, for a Prometheus histogram, the upper bound of the bucket with this quantile; None in the last one,
    which has none."""
    bounds = sorted((float(bound), count) for bound, count in cumulated.items())
    found = next(bound for bound, count in bounds if count >= share * bounds[-1][1])
    return found if math.isfinite(found) else None


def _less(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {bound: count - before.get(bound, 0.0) for bound, count in after.items()}


CONTENDERS = {FLOOR: floor, BARE: bare, OPERATOR: operator, INDEXED: indexed, JOBSET: jobset}
