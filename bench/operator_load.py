"""What the operator asks of an API server, and what a pod event and an idle cluster cost it.

    .venv/bin/python -m bench.operator_load [gang | jobs | crowd ...]

Runs the real operator process against an API server in memory. `gang`: a gang of 64 starts and restarts once. `jobs`:
50 gangs of 4 do. `crowd`: 1500 finished jobs and 8000 workers of running jobs exist when the operator starts; then pods
change, first in a way that no plan can see. Requests are counted by verb and kind.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.api_server import Cluster, serve
from bench.operator_memory import OperatorProcess, a_job, an_operator, fail, make_ready, pods_of, state, until

_TICKS = os.sysconf("SC_CLK_TCK")
_VERBS = {"POST": "create", "PUT": "update", "DELETE": "delete"}


class Counting(Cluster):
    """Counts requests by verb and kind."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if "namespaces" in parts or parts[-1] in ("pods", "tputrainingjobs"):
            rest = parts[parts.index("namespaces") + 2 :] if "namespaces" in parts else parts[-1:]
            read = "watch" if request.query.get("watch") else "get" if len(rest) > 1 else "list"
            self.asked[f"{_VERBS.get(request.method, read)} {rest[0]}"] += 1
        return await super().handle(request)


def shown(counted: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counted.items())) + f"; all {counted.total()}"


def cpu_seconds(operator: OperatorProcess) -> float:
    fields = Path(f"/proc/{operator._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_mib(operator: OperatorProcess) -> int:
    status = Path(f"/proc/{operator._process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024


async def gangs(count: int, hosts: int) -> None:
    cluster = Counting()
    names = [f"job{number}" for number in range(count)]
    async with serve(cluster) as url, an_operator(url) as operator:
        await asyncio.sleep(5)
        cluster.asked.clear()
        for name in names:
            cluster.add("tputrainingjobs", a_job(name, hosts))
        for attempt in (1, 2):
            await until(lambda attempt=attempt: len(pods_of(cluster, attempt)) == count * hosts, operator)
            await make_ready(cluster, pods_of(cluster, attempt))
            await until(lambda: all(state(cluster, name) == "Running" for name in names), operator)
            print(f"{count} x {hosts}, attempt {attempt}: {shown(cluster.asked)}", flush=True)
            cluster.asked.clear()
            if attempt == 1:
                for name in names:
                    fail(cluster, cluster.objects["pods"]["default", f"{name}-1-0-0"])


def running_job(name: str, hosts: int, *, is_finished: bool) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    status: dict[str, Any] = {"state": "Running", "attempt": 1, "startTime": now, "observedGeneration": 1}
    if is_finished:
        ended = {"type": "Succeeded", "status": "True", "reason": "x", "message": "", "lastTransitionTime": now}
        status |= {"state": "Succeeded", "completionTime": now, "conditions": [ended]}
    return a_job(name, hosts) | {"status": status}


async def crowd(jobs: int = 125, hosts: int = 64, finished: int = 1500, events: int = 8000) -> None:
    cluster = Counting()
    for number in range(finished):
        cluster.add("tputrainingjobs", running_job(f"done{number}", 4, is_finished=True))
    for number in range(jobs):
        name = f"job{number}"
        job = cluster.add("tputrainingjobs", running_job(name, hosts, is_finished=False))
        for host in range(hosts):
            cluster.add("pods", a_worker(job, host))
    await make_ready(cluster, cluster.all("pods"))
    async with serve(cluster) as url, an_operator(url) as operator:
        # The passes of the start write the status of every job that runs.
        await until(lambda: cluster.asked["update tputrainingjobs"] >= jobs, operator)
        await asyncio.sleep(20)
        print(f"{jobs * hosts} pods, {finished} finished jobs: {resident_mib(operator)} MiB resident, peak")
        print(f"  {operator.peak_mib} MiB; start: {shown(cluster.asked)}", flush=True)
        for what in ("that no plan can see", "that a plan can see"):
            cluster.asked.clear()
            began = cpu_seconds(operator)
            await asyncio.sleep(10)
            idle = cpu_seconds(operator) - began
            began = cpu_seconds(operator)
            for index, pod in enumerate(cluster.all("pods")[:events]):
                if what == "that a plan can see":
                    pod["status"]["message"] = "seen"
                pod["metadata"]["annotations"] = {"seen": what}
                cluster.put("pods", pod)
                if index % 100 == 0:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(10)
            used = cpu_seconds(operator) - began - idle
            print(f"{events} pod events {what}: {1e6 * used / events:.0f} µs of CPU each (idle: {idle / 10:.1%} of a")
            print(f"  core); {resident_mib(operator)} MiB resident; {shown(cluster.asked)}", flush=True)


def a_worker(job: dict[str, Any], host: int) -> dict[str, Any]:
    name, group = job["metadata"]["name"], "tpu-operator.dev"
    owner = {"apiVersion": f"{group}/v1alpha1", "kind": "TPUTrainingJob", "name": name, "controller": True}
    labels = {"job-name": name, "attempt": "1", "slice-index": "0", "host-index": str(host)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-1-0-{host}",
            "namespace": "default",
            "labels": {f"{group}/{key}": value for key, value in labels.items()},
            "ownerReferences": [owner | {"uid": job["metadata"]["uid"]}],
        },
        "spec": {"containers": [{"name": "trainer", "command": ["python", "-m", "tpu_trainer"]}]},
    }


async def main() -> None:
    for what in sys.argv[1:] or ("gang", "jobs", "crowd"):
        await {"gang": lambda: gangs(1, 64), "jobs": lambda: gangs(50, 4), "crowd": crowd}[what]()


if __name__ == "__main__":
    asyncio.run(main())
