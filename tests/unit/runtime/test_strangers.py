"""A stranger at each port of the operator, under the chart's memory limit: whatever it sends or leaves unsaid, the
process lives, answers its kubelet, and takes a worker's report."""

import asyncio
import json
import resource
import ssl
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.cluster import cgroups
from tests.cluster.deadlines import deadline
from tests.layers import STARTED_WITH
from tests.trainer import fork_server
from tests.unit import attacked_ports
from tests.unit.attacked_ports import SERVICE_HOST
from tests.unit.progress_desk import BEARER, GOOD, PROGRESS
from tests.unit.tls_probe import LOOPBACK

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts/tpu-training-operator"
MIB = 2**20
LIMIT_MIB = int(yaml.safe_load((CHART / "values.yaml").read_text())["resources"]["limits"]["memory"].removesuffix("Mi"))
# The other half is for the jobs that an operator knows. A forked process does not count the 16 MiB of libraries that
# the one behind it has read.
MOST_MIB = LIMIT_MIB // 2 - 16
# More than a kubelet waits, because other tests run, too.
PATIENCE_SECONDS = 30

REPORT = f"POST {PROGRESS} HTTP/1.1\r\nHost: operator\r\nAuthorization: Bearer {{token}}\r\n"
PATHS = {"progress": f"POST {PROGRESS}", "metrics": "GET /metrics", "health": "GET /healthz"}
LARGE_HEADER = b"x: " + b"y" * 7900 + b"\r\n"
ENDLESS = [b"z" * 65536] * 16


@dataclass(frozen=True)
class Attack:
    """What each of the connections to a port says, then nothing more: it reads no answer and never hangs up. `{token}`
    becomes one that nobody has seen. `tls`: how far a handshake goes. `addresses`: from how many they come."""

    port: str
    connections: int
    says: tuple[bytes, ...]
    shakes_hands: bool = True
    addresses: int = 1


def asks(port: str, *headers: str) -> bytes:
    token = ("Authorization: Bearer {token}",) if port == "progress" else ()
    return "\r\n".join((f"{PATHS[port]} HTTP/1.1", "Host: operator", *token, *headers, "")).encode()


def whole(port: str, *headers: str) -> bytes:
    return asks(port, *headers) + b"\r\n"


HEADERS_WITHOUT_END = (asks("progress"), *[LARGE_HEADER] * 120)
LARGE_REQUEST = b"".join((asks("progress"), *[b"x: " + b"y" * 4000 + b"\r\n"] * 30, b"\r\n"))
LENGTH, CHUNKED, UPGRADE = "Content-Length: 99999999999", "Transfer-Encoding: chunked", "Connection: upgrade"
HELLO_WITHOUT_END = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc"
ATTACKS = {
    "heads without end": Attack("progress", 209, HEADERS_WITHOUT_END),
    "from many addresses": Attack("progress", 300, HEADERS_WITHOUT_END, addresses=300),
    "heads at metrics": Attack("metrics", 800, (asks("metrics"), *[LARGE_HEADER] * 120)),
    "heads at health": Attack("health", 800, (asks("health"), *[LARGE_HEADER] * 120)),
    "many connections": Attack("metrics", 1500, (asks("metrics"), *[LARGE_HEADER] * 3)),
    "many small headers": Attack("progress", 250, (asks("progress"), *[b"a:\r\n" * 1000] * 40)),
    "requests behind one another": Attack("progress", 250, (whole("progress") * 20, *[LARGE_REQUEST] * 30)),
    "bodies without end": Attack("progress", 250, (whole("progress", LENGTH), *ENDLESS)),
    "tiny chunks": Attack("progress", 100, (whole("progress", CHUNKED), *[b"1\r\nx\r\n" * 5000] * 8)),
    "bodies that do not come": Attack("progress", 300, (whole("progress", "Content-Length: 10"),)),
    "answers that are not read": Attack("metrics", 300, (whole("metrics") * 200,)),
    "another protocol": Attack("health", 300, (whole("health", UPGRADE, "Upgrade: websocket"), *ENDLESS)),
    "no handshake": Attack("progress", 600, (), shakes_hands=False),
    "a handshake without end": Attack("progress", 300, (HELLO_WITHOUT_END, *ENDLESS), shakes_hands=False),
}


class Operator:
    def __init__(self, process: fork_server.ForkedProcess, directory: Path) -> None:
        self._process = process
        self.ports: dict[str, int] = json.loads(process.stdout.readline())
        self._trust = ssl.create_default_context(cafile=str(directory / "ca.crt"))

    @property
    def peak_mib(self) -> float:
        """Also of a process that is no more: then nothing is left to read, which fails."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    @asynccontextmanager
    async def attacked(self, attack: Attack) -> AsyncIterator[None]:
        """Enters when each connection has said what it has to say, or could not."""
        said = [asyncio.Event() for _ in range(attack.connections)]
        strangers = [asyncio.create_task(self._stranger(attack, number, event)) for number, event in enumerate(said)]
        try:
            await asyncio.gather(*(event.wait() for event in said))
            yield
        finally:
            for stranger in strangers:
                stranger.cancel()
            await asyncio.gather(*strangers, return_exceptions=True)

    async def _stranger(self, attack: Attack, number: int, said: asyncio.Event) -> None:
        """Comes back: what a connection leaves behind must not add up."""
        opened: list[asyncio.StreamWriter] = []
        try:
            for _ in range(2):
                # OSError: the operator hangs up. A server that does not read lets nobody drain.
                with suppress(OSError):
                    opened.append(await self._open(attack, number % attack.addresses))
                    async with asyncio.timeout(2):
                        for piece in attack.says:
                            opened[-1].write(piece.replace(b"{token}", uuid.uuid4().hex.encode()))
                            await opened[-1].drain()
            said.set()
            await asyncio.Event().wait()
        finally:
            said.set()
            for writer in opened:
                writer.transport.abort()

    async def _open(self, attack: Attack, address: int) -> asyncio.StreamWriter:
        tls = self._trust if attack.port == "progress" and attack.shakes_hands else None
        async with asyncio.timeout(deadline(PATIENCE_SECONDS)):
            _, writer = await asyncio.open_connection(
                LOOPBACK,
                self.ports[attack.port],
                ssl=tls,
                server_hostname=SERVICE_HOST if tls else None,
                local_addr=(f"127.0.{1 + address // 250}.{1 + address % 250}", 0),
                limit=1,
            )
        return writer

    async def answers(self) -> list[int]:
        """What a kubelet, Prometheus and a worker are answered."""
        return [await self._get("health", "/healthz"), await self._get("metrics", "/metrics"), await self._report()]

    async def _get(self, port: str, path: str) -> int:
        url = f"http://{LOOPBACK}:{self.ports[port]}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status

    async def _report(self) -> int:
        url = f"https://{LOOPBACK}:{self.ports['progress']}{PROGRESS}"
        async with (
            aiohttp.ClientSession(headers=BEARER) as session,
            session.post(url, json=GOOD, ssl=self._trust, server_hostname=SERVICE_HOST) as answer,
        ):
            return answer.status


@contextmanager
def memory_limited(pid: int) -> Iterator[None]:
    """As in the chart's container, where this machine lets a test make control groups."""
    group = f"tpu-training-operator-ports-{pid}"
    try:
        cgroups.create(group)
    except OSError:
        yield
        return
    try:
        cgroups.limit_memory(group, LIMIT_MIB * MIB, pid)
        yield
    finally:
        cgroups.remove(group)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    env = {**STARTED_WITH, attacked_ports.FOLDER: str(tmp_path)}
    process = fork_server.start(attacked_ports.IMPORTS, attacked_ports.__name__, env, str(ROOT))
    with ExitStack() as stack:
        stack.enter_context(process.stdout)
        stack.enter_context(memory_limited(process.pid))
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield Operator(process, tmp_path)


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_a_stranger_costs_the_operator_little_and_keeps_nobody_out(operator: Operator, attack: Attack) -> None:
    async with operator.attacked(attack), asyncio.timeout(deadline(PATIENCE_SECONDS)):
        assert await operator.answers() == [200, 200, 200]
    assert operator.peak_mib < MOST_MIB
