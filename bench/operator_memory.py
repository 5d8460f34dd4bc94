"""How much memory the operator needs for its largest jobs, and for how long its event loop blocks.

    .venv/bin/python -m bench.operator_memory [hosts ...]

Runs the real operator process against an API server in memory, whose pods are as large as real ones (7.4 KB). For each
number of hosts a job is created and runs; then the operator is restarted, finds the gang, and replaces all of it
after a failure. Peaks come from the kernel (VmHWM). "standstill" is the longest time that /healthz did not answer; on a
busy machine it is longer than the operator's own share.
"""

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from bench.api_server import Cluster, serve

HOSTS = (4, 64, 2304, 5000)


class OperatorProcess:
    """One operator. `peak_mib` and `standstill` cover its whole life."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self._health = f"http://127.0.0.1:{port}/healthz"
        self.standstill = 0.0

    @property
    def peak_mib(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) // 1024

    @property
    def is_healthy(self) -> bool:
        return self._process.returncode is None

    async def watch(self) -> None:
        async with aiohttp.ClientSession() as session:
            began = None
            while True:
                asked = time.monotonic()
                try:
                    async with session.get(self._health) as answer:
                        await answer.read()
                    if began is not None:
                        self.standstill = max(self.standstill, time.monotonic() - asked)
                    began = asked
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)


@asynccontextmanager
async def an_operator(url: str, *options: str) -> AsyncIterator[OperatorProcess]:
    with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        kubeconfig = Path(directory) / "config"
        kubeconfig.write_text(yaml.safe_dump(_kubeconfig(url)))
        with (Path(directory) / "log").open("w") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tpu_training_operator", "--health-port", str(port)),
                *options,
                env=os.environ | {"KUBECONFIG": str(kubeconfig)},
                stderr=log,
                stdout=log,
            )
        operator = OperatorProcess(process, port)
        watch = asyncio.create_task(operator.watch())
        try:
            yield operator
        finally:
            watch.cancel()
            if process.returncode is None:
                process.kill()
            await process.wait()


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "clusters": [{"name": "bench", "cluster": {"server": url}}],
        "users": [{"name": "bench", "user": {"token": "bench"}}],
    }


def a_job(name: str, hosts: int, **policy: Any) -> dict[str, Any]:
    described = {"generation": "tpu8t", "topology": f"{hosts}x1x1", "chipsPerHost": 1}
    if hosts > 9999:
        raise ValueError("a topology has no longer side than 9999")
    return {
        "apiVersion": "tpu-operator.dev/v1alpha1",
        "kind": "TPUTrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "slice": described,
            "trainer": {"image": "localhost/tpu-examples:1", "entrypoint": "examples.digits:task"},
            "recipe": {
                "globalBatchSize": 8 * hosts,
                "trainSteps": 300,
                "optimizer": {"name": "sgd", "learningRate": 0.1},
            },
            # No node of this API server runs a check to its end.
            "entryCheck": {"mode": "Skip"},
            "runPolicy": policy,
        },
    }


async def until(condition: Callable[[], bool], operator: OperatorProcess, seconds: float = 300) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not condition():
        if not operator.is_healthy or time.monotonic() - began > seconds:
            raise SystemExit(f"the operator did not get there in {seconds:.0f} s")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


def state(cluster: Cluster, name: str) -> str:
    return str(cluster.objects["tputrainingjobs"]["default", name].get("status", {}).get("state"))


def pods_of(cluster: Cluster, attempt: int) -> list[dict[str, Any]]:
    label = "tpu-operator.dev/attempt"
    return [pod for pod in cluster.all("pods") if pod["metadata"]["labels"][label] == str(attempt)]


async def make_ready(cluster: Cluster, pods: list[dict[str, Any]]) -> None:
    """Starts the pods like kubelets: each separately, after the time that an image takes."""
    for index, pod in enumerate(pods):
        pod["spec"]["nodeName"] = f"node-{index}"
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": pod["metadata"]["creationTimestamp"]}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready", "PodReadyToStartContainers")
        ]
        running = {"name": "trainer", "state": {"running": {}}, "image": "x" * 100, "imageID": "y" * 100}
        addresses = [{"ip": f"10.0.{index // 256}.{index % 256}"}]
        pod["status"] = {
            "phase": "Running",
            "podIPs": addresses,
            "conditions": conditions,
            "containerStatuses": [running],
        }
        cluster.put("pods", pod)
        if index % 50 == 0:
            await asyncio.sleep(0.01)


def fail(cluster: Cluster, pod: dict[str, Any]) -> None:
    ended = {"exitCode": 137, "reason": "Error", "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    pod["status"] |= {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}]}
    cluster.put("pods", pod)


async def measure(hosts: int) -> str:
    cluster = Cluster()
    async with serve(cluster) as url:
        async with an_operator(url) as operator:
            cluster.add("tputrainingjobs", a_job("digits", hosts))
            created = await until(lambda: len(pods_of(cluster, 1)) == hosts, operator)
            await make_ready(cluster, pods_of(cluster, 1))
            await until(lambda: state(cluster, "digits") == "Running", operator)
            first = operator.peak_mib, operator.standstill
        async with an_operator(url) as operator:
            # Once it has reconciled another job, it has reconciled the gang.
            cluster.add("tputrainingjobs", a_job("other", 1))
            await until(lambda: state(cluster, "other") == "Starting", operator)
            found = operator.peak_mib
            fail(cluster, pods_of(cluster, 1)[-1])
            replaced = await until(lambda: len(pods_of(cluster, 2)) == hosts, operator)
            await make_ready(cluster, pods_of(cluster, 2))
            await until(lambda: state(cluster, "digits") == "Running", operator)
            second = operator.peak_mib, operator.standstill
    return (
        f"{hosts:>5}  {first[0]:>7} MiB {first[1]:>7.2f} s {created:>7.1f} s  {found:>7} MiB"
        f"  {second[0]:>7} MiB {second[1]:>7.2f} s {replaced:>7.1f} s"
    )


async def main() -> None:
    print("hosts  created: peak, standstill, time    found: peak  replaced: peak, standstill, time", flush=True)
    for hosts in map(int, sys.argv[1:] or HOSTS):
        print(await measure(hosts), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
