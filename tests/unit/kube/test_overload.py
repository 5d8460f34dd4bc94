"""Many jobs restart against an API server that cannot take it: what the operator's client sends, second by second.

The real client, stages and turns; the server behind them is a model, and its time is virtual.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import Configuration

from tests.unit.jobs import job_body
from tests.unit.pods import NOON
from tests.unit.virtual_time import run
from tpu_training_operator.domain.objects.actions import Create
from tpu_training_operator.domain.plan.plan import Batch, Plan
from tpu_training_operator.kube.client import Client, ClientOptions
from tpu_training_operator.kube.cluster import CONFIG_MAPS, JobKey
from tpu_training_operator.kube.credentials import Credentials
from tpu_training_operator.kube.encoding import decode, encode
from tpu_training_operator.kube.errors import ApiError
from tpu_training_operator.kube.turns import PLACES
from tpu_training_operator.runtime.execution import Memory, PlanExecution

JOBS, HOSTS = 16, 400
ANSWER_SECONDS = 0.1
# The seconds in which the server takes no more than a few writes at once, or none at all.
OVERLOAD = range(3, 13)
TAKEN = (8, 0)
# The most that there can be: every place is used all the time.
FULL_RATE = PLACES / ANSWER_SECONDS


class Server:
    """Takes the place of aiohttp's session. `created`, `refused`: requests by the second in which they arrived."""

    def __init__(self, taken: int) -> None:
        self.taken = taken
        self.pods: Counter[str] = Counter()
        self.created: Counter[int] = Counter()
        self.refused: Counter[int] = Counter()
        self._under_way = 0

    @asynccontextmanager
    async def request(self, method: str, url: str, *, data: bytes | None = None, **_: Any) -> AsyncIterator[Any]:
        second = int(asyncio.get_running_loop().time())
        if method == "GET":
            await asyncio.sleep(ANSWER_SECONDS)
            # For both: the job that stages ask for, and the object that the reader asks for.
            yield answer(200, job_body())
            return
        assert data is not None
        if second in OVERLOAD and self._under_way >= self.taken:
            self.refused[second] += 1
            yield answer(429, {"kind": "Status", "reason": "TooManyRequests"}, {"Retry-After": "1"})
            return
        self._under_way += 1
        try:
            await asyncio.sleep(ANSWER_SECONDS)
        finally:
            self._under_way -= 1
        body = decode(data)
        self.pods[body["metadata"]["name"]] += 1
        self.created[second] += 1
        yield answer(201, body)


def answer(status: int, body: object, headers: dict[str, str] | None = None) -> Any:
    async def pieces() -> AsyncIterator[bytes]:
        yield encode(body)

    content = SimpleNamespace(iter_any=pieces)
    return SimpleNamespace(
        status=status, headers=headers or {}, content=content, method="POST", url=SimpleNamespace(path="/")
    )


async def restart(client: Client, server: Server, name: str) -> None:
    """Creates a gang's pods like the controller: after an error, with what is missing and a little later."""
    key, body = JobKey("default", name), job_body()
    failures = 0
    while missing := [pod for pod in names(name) if not server.pods[pod]]:
        execution = PlanExecution(client, lambda: NOON, None, key, body, Memory())
        try:
            await execution.carry_out(Plan((Batch([Create(a_pod(pod)) for pod in missing]),)))
        except ApiError as error:
            await asyncio.sleep(max(error.retry_after, 0.05 * 2**failures))
            failures += 1


def names(job: str) -> Iterable[str]:
    return (f"{job}-{host}" for host in range(HOSTS))


def a_pod(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}}


async def slowest_read(client: Client) -> float:
    """Reads again and again until it is cancelled."""
    loop, slowest = asyncio.get_running_loop(), 0.0
    try:
        while True:
            began = loop.time()
            await client.get(CONFIG_MAPS, "default", "data")
            slowest = max(slowest, loop.time() - began)
            await asyncio.sleep(0.5)
    except asyncio.CancelledError:
        return slowest


async def storm(taken: int) -> tuple[Server, float]:
    server = Server(taken)
    session: Any = server
    client = Client(session, Credentials(Configuration()), ClientOptions())
    # Reads the token in a thread, once.
    await client.get(CONFIG_MAPS, "default", "data")
    reader = asyncio.create_task(slowest_read(client))
    await asyncio.gather(*(restart(client, server, f"job{number}") for number in range(JOBS)))
    reader.cancel()
    return server, await reader


@pytest.fixture(scope="module", params=TAKEN, ids=["takes a few", "takes none"])
def after_the_storm(request: pytest.FixtureRequest) -> tuple[Server, float]:
    return run(storm(request.param))


def test_every_pod_is_created_once(after_the_storm: tuple[Server, float]) -> None:
    server, _ = after_the_storm
    assert set(server.pods) == {pod for number in range(JOBS) for pod in names(f"job{number}")}
    assert set(server.pods.values()) == {1}


def test_the_server_gets_what_it_takes(after_the_storm: tuple[Server, float]) -> None:
    server, _ = after_the_storm
    assert server.created[2] > 0.5 * FULL_RATE
    for second in OVERLOAD[2:]:
        assert server.created[second] <= server.taken / ANSWER_SECONDS
        assert server.created[second] >= server.taken / ANSWER_SECONDS / 2


def test_there_is_no_storm_of_retries(after_the_storm: tuple[Server, float]) -> None:
    """A request that has to pause keeps its place, so none is refused twice in the second that the server asks for."""
    server, _ = after_the_storm
    for second in OVERLOAD:
        assert server.refused[second] <= 3 * (PLACES + JOBS)
    assert sum(server.refused.values()) <= 1.5 * len(OVERLOAD) * (PLACES + JOBS)


def test_the_rate_recovers(after_the_storm: tuple[Server, float]) -> None:
    server, _ = after_the_storm
    rates = [server.created[second] for second in range(OVERLOAD[-1] + 1, max(server.created))]
    assert max(rates) > 0.5 * FULL_RATE


def test_reads_wait_for_nothing(after_the_storm: tuple[Server, float]) -> None:
    _, slowest = after_the_storm
    assert slowest == pytest.approx(ANSWER_SECONDS)
