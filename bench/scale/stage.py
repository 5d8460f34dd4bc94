"""The stage of all measurements: a real control plane with simulated nodes, the shipped operator, and one client.

The controller manager and the scheduler are not throttled (tests/cluster/control_plane.py), so they do not hide what
anybody else costs. Workers run on CPU nodes with room for a hundred pods: placing a slice costs the scheduler the same
whoever created its pods, and is measured elsewhere (bench/placement.py).
"""

import asyncio
import itertools
import json
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.scale.audit import POLICY, AuditLog
from bench.scale.jobset import JobSetController
from bench.scale.operator import Operator
from tests.cluster.binaries import BuildError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.directories import create_cluster_directory
from tests.cluster.kwok import add_cpu_nodes, start_kwok
from tests.cluster.toolchain import ToolchainMissing

Object = dict[str, Any]

IN_FLIGHT = 64
"""Requests of the bare client at once."""

FLOOR, BARE, OPERATOR, INDEXED, JOBSET = "floor", "bare-pods", "operator", "indexed-job", "jobset"
"""The contenders, each with a namespace of this name."""
NAMESPACES = (FLOOR, BARE, OPERATOR, INDEXED, JOBSET)
_PODS_PER_NODE = 100
_POLL_SECONDS = 0.1
_LONGEST_SECONDS = 600.0
AT_ONCE = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0, "propagationPolicy": "Background"}


class Client:
    """As simple as a client can be: JSON over connections that stay open."""

    def __init__(self, session: aiohttp.ClientSession, server: str) -> None:
        self._session = session
        self._server = server

    async def call(self, method: str, path: str, body: Object | None = None, **headers: str) -> Object:
        async with self._session.request(method, self._server + path, json=body, headers=headers) as answer:
            found: Object = await answer.json()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {found.get('message')}")
            return found

    async def all(self, method: str, calls: Iterable[tuple[str, Object | None]]) -> None:
        """Makes all the calls, IN_FLIGHT at once."""
        left = iter(calls)

        async def lane() -> None:
            for path, body in left:
                await self.call(method, path, body)

        async with asyncio.TaskGroup() as lanes:
            for _ in range(IN_FLIGHT):
                lanes.create_task(lane())


@dataclass(frozen=True)
class Stage:
    """`job_sets`: None where JobSet cannot be had, or is not wanted."""

    cluster: ControlPlane
    operator: Operator
    job_sets: JobSetController | None
    client: Client
    audit: AuditLog
    _runs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new_name(self) -> str:
        """Makes a name for a job, never the same: what is left of an old job may wait for the garbage collector."""
        return f"run{next(self._runs)}"

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not await holds():
            if loop.time() - began > _LONGEST_SECONDS:
                raise TimeoutError(f"not so after {_LONGEST_SECONDS:g} s: {what}")
            await asyncio.sleep(_POLL_SECONDS)

    async def until_created(self, mark: int, pods: int) -> None:
        """Until so many pods were created after the mark, whoever did it."""
        before = sum(request.label == "create pods" for request in self.audit.requests[:mark])

        async def created() -> bool:
            if self.audit.pods_posted() < before + pods:
                return False
            return sum(request.creates_pod for request in self.audit.since(mark)) >= pods

        await self.until(created, f"{pods} pods are created")

    async def clear(self, namespace: str) -> None:
        """Nothing is left in the namespace that a contender made. Jobs go first, so that nobody replaces pods."""
        own = [job_sets_path(namespace)] if namespace == JOBSET else []
        for collection in (*own, jobs_path(namespace), batch_path(namespace), pods_path(namespace)):
            await self.client.call("DELETE", collection, AT_ONCE)

        # The garbage collector's writes must not fall into the next run.
        async def gone() -> bool:
            lists = [await self.client.call("GET", f"{path}?limit=1") for path in left_paths(namespace)]
            return not any(found["items"] for found in lists)

        await self.until(gone, f"nothing is left in {namespace}")
        await self.audit.quiet()


def pods_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def jobs_path(namespace: str) -> str:
    return f"/apis/tpu-operator.dev/v1alpha1/namespaces/{namespace}/tputrainingjobs"


def batch_path(namespace: str) -> str:
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"


def job_sets_path(namespace: str) -> str:
    return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"


def left_paths(namespace: str) -> tuple[str, ...]:
    """Lists what belonged to jobs and is deleted after them."""
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    return pods_path(namespace), f"/api/v1/namespaces/{namespace}/services", slices


@asynccontextmanager
async def a_stage(pods: int, *, with_job_sets: bool = True) -> AsyncIterator[Stage]:
    """Makes a cluster with room for so many pods, in which the operator runs. Without JobSet it costs less."""
    directory = create_cluster_directory()
    policy, log = directory / "audit-policy", directory / "audit.log"
    policy.write_text(json.dumps(POLICY))
    # The log is not rotated: nothing of it may be missed.
    flags = (f"--audit-policy-file={policy}", f"--audit-log-path={log}", "--audit-log-maxsize=100000")
    with ControlPlane(directory=directory, apiserver_flags=flags) as cluster:
        start_kwok(cluster)
        add_cpu_nodes(cluster, -(-pods // _PODS_PER_NODE))
        for name in NAMESPACES:
            cluster.kubectl("create", "namespace", name)
        # The operator looks at what resolves names.
        cluster.kubectl(
            "run", "coredns", "--namespace=kube-system", "--labels=k8s-app=kube-dns", "--image=coredns/coredns:1"
        )
        operator = Operator(cluster)
        operator.start()
        job_sets = _job_sets(cluster) if with_job_sets else None
        async with _client(cluster) as client:
            stage = Stage(cluster, operator, job_sets, client, AuditLog(log, operator.user))
            await stage.audit.quiet()
            yield stage


def _job_sets(cluster: ControlPlane) -> JobSetController | None:
    try:
        return JobSetController(cluster)
    except (ToolchainMissing, BuildError) as error:
        print(f"measuring without JobSet: {error}", file=sys.stderr, flush=True)
        return None


@asynccontextmanager
async def _client(cluster: ControlPlane) -> AsyncIterator[Client]:
    tls = ssl.create_default_context(cafile=str(cluster.ca_file))
    token = json.loads(cluster.kubeconfig.read_text())["users"][0]["user"]["token"]
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT, ssl=tls)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:
        yield Client(session, cluster.server)
