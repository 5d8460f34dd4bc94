"""The progress service as a worker meets it: what is taken in, and how it says no to everything else."""

import asyncio
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer, unused_port

from tests.unit.jobs import job_body
from tests.unit.pods import pod
from tests.unit.reviewing_cluster import ReviewingCluster, token_of
from tests.unit.tls_probe import LOOPBACK, trusting
from tpu_training_operator.domain.report import Inbox
from tpu_training_operator.runtime.cluster import Cluster, Unavailable
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.keys import JobKey
from tpu_training_operator.runtime.progress import connections
from tpu_training_operator.runtime.progress import server as module
from tpu_training_operator.runtime.progress.certificates import new_authority
from tpu_training_operator.runtime.progress.reviewer import Reviewer
from tpu_training_operator.runtime.progress.server import MOST_BYTES, ProgressService, serve
from tpu_training_operator.runtime.progress.tls import server_tls

KEY = JobKey("default", "digits")
NOW = datetime(2026, 1, 15, 12, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
PROGRESS = "/apis/tpu-operator.dev/v1alpha1/namespaces/default/tputrainingjobs/digits/progress"
TRAINER_STATUS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/digits/status"
GOOD = {"phase": "Training", "step": 7}
# A test that fails ends then; none waits for so long.
SECONDS = 20
BEARER = {"Authorization": "Bearer token"}


class Desk:
    """The service, the cluster behind it, and what came of the reports. Its time stands still until it is set."""

    def __init__(self) -> None:
        self.cluster = ReviewingCluster()
        self.now = NOW
        self.inboxes = Inboxes(lambda: self.now)
        self.hints: list[JobKey] = []
        self.seconds = 0.0
        self.service = ProgressService(
            reviewer=Reviewer(cast("Cluster", self.cluster), lambda: self.seconds),
            inboxes=self.inboxes,
            hint=self.hints.append,
            clock=lambda: NOW,
            seconds=lambda: self.seconds,
        )

    @contextmanager
    def api_server_held(self) -> Iterator[None]:
        """Within the block the API server answers nothing."""
        self.cluster.gate = asyncio.Event()
        try:
            yield
        finally:
            self.cluster.gate.set()

    @property
    def inbox(self) -> Inbox:
        return self.inboxes.of(KEY)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
async def worker(desk: Desk) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(desk.service.application())) as client:
        yield client


async def post(
    worker: TestClient[Any, Any], path: str = PROGRESS, *, headers: dict[str, str] = BEARER, **request: Any
) -> tuple[int, Any]:
    """The status, and the JSON of the answer."""
    given = request or {"json": GOOD}
    async with asyncio.timeout(SECONDS), worker.post(path, headers=headers, **given) as response:
        return response.status, await response.json()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - a few rounds of the loop, and nobody tells
            await asyncio.sleep(0)


# Taken in


async def test_a_report_reaches_the_inbox_and_the_job_is_looked_at(desk: Desk, worker: TestClient[Any, Any]) -> None:
    assert await post(worker, json=GOOD | {"loss": 0.25}) == (200, {"stacks": False})
    report = desk.inbox.report
    assert report is not None
    assert (report.step, report.loss, report.attempt, report.received) == (7, "0.25", 1, NOW)
    assert desk.hints == [KEY]


async def test_kubeflow_trainers_report_reaches_the_same_inbox(desk: Desk, worker: TestClient[Any, Any]) -> None:
    status = {"progressPercentage": 50, "metrics": [{"name": "current_step", "value": "150"}]}
    assert await post(worker, TRAINER_STATUS, json={"trainerStatus": status}) == (200, {})
    report = desk.inbox.report
    assert report is not None
    assert report.step == 150
    assert desk.hints == [KEY]


async def test_a_worker_is_asked_for_its_stacks_until_they_are_there(desk: Desk, worker: TestClient[Any, Any]) -> None:
    desk.inboxes.ask_for_stacks(KEY)
    assert await post(worker) == (200, {"stacks": True})
    assert await post(worker, json=GOOD | {"stacks": "Thread 1: ..."}) == (200, {"stacks": False})


async def test_a_report_of_an_old_attempts_worker_is_taken_and_changes_nothing(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    new = pod(attempt=2)
    desk.cluster.objects.append(new)
    desk.cluster.tokens["new"] = token_of(new)
    await post(worker, headers={"Authorization": "Bearer new"}, json=GOOD | {"step": 20})
    assert (await post(worker))[0] == 200
    report = desk.inbox.report
    assert report is not None
    assert (report.attempt, report.step) == (2, 20)


async def test_a_report_as_long_as_may_be_is_taken(worker: TestClient[Any, Any]) -> None:
    body = json.dumps(GOOD).encode()
    assert (await post(worker, data=body + b" " * (MOST_BYTES - len(body))))[0] == 200


# Refused


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "token"},
        {"Authorization": "Basic token"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer garbage"},
        {"Authorization": "Bearer " + "x" * 8000},
        {"Authorization": "Bearer töken"},
    ],
    ids=["none", "no scheme", "another scheme", "no token", "an empty one", "garbage", "endless", "not ASCII"],
)
async def test_without_a_good_token_it_is_401(
    desk: Desk, worker: TestClient[Any, Any], headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await post(worker, headers=headers)
    assert status == 401
    assert "token" in answer["message"]
    assert desk.inbox.report is None
    assert caplog.records == []


async def test_another_jobs_worker_is_403(desk: Desk, worker: TestClient[Any, Any]) -> None:
    desk.cluster.objects.append(job_body({"metadata.name": "letters", "metadata.uid": "of-letters"}))
    path = PROGRESS.replace("digits", "letters")
    assert await post(worker, path) == (403, {"message": "pod digits-1-0-0 belongs to job digits, not letters"})


async def test_a_job_that_is_gone_is_404(desk: Desk, worker: TestClient[Any, Any]) -> None:
    desk.cluster.objects = [pod()]
    assert await post(worker) == (404, {"message": "job digits is gone"})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"phase": "Training", "step": "7"}'])
async def test_a_report_that_is_none_is_400_and_says_why(
    desk: Desk, worker: TestClient[Any, Any], body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await post(worker, data=body)
    assert (status, set(answer)) == (400, {"message"})
    assert desk.inbox.report is None
    assert desk.hints == []
    assert caplog.records == []


async def test_a_longer_report_is_413_told_or_not_how_long_it_is(worker: TestClient[Any, Any]) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(MOST_BYTES // 1024 + 1):
            yield b" " * 1024

    too_long = (413, {"message": f"the body is longer than {MOST_BYTES} bytes"})
    assert await post(worker, data=b" " * (MOST_BYTES + 1)) == too_long
    assert await post(worker, data=in_pieces()) == too_long


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", PROGRESS, 405),
        ("PUT", PROGRESS, 405),
        ("POST", "/", 404),
        ("POST", PROGRESS + "/more", 404),
        ("POST", PROGRESS.replace("digits", "a/b"), 404),
        ("POST", PROGRESS.replace("tputrainingjobs", "trainjobs"), 404),
    ],
)
async def test_what_does_not_exist_is_said_in_json(
    worker: TestClient[Any, Any], method: str, path: str, status: int
) -> None:
    async with worker.request(method, path, headers=BEARER) as response:
        assert response.status == status
        assert "reports are POSTed to" in (await response.json())["message"]


async def test_our_own_mistake_is_500_and_in_the_log(
    desk: Desk, worker: TestClient[Any, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inboxes, "put", lambda *_: 1 // 0)
    status, answer = await post(worker)
    assert (status, "the operator's log says why" in answer["message"]) == (500, True)
    assert [record.message for record in caplog.records] == ["a report could not be taken"]


# Later


async def test_an_api_server_that_is_away_is_503(desk: Desk, worker: TestClient[Any, Any]) -> None:
    desk.cluster.error = Unavailable(0, "NoAnswer", "no route")
    async with worker.post(PROGRESS, headers=BEARER, json=GOOD) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "5")
        assert "no route" in (await response.json())["message"]


async def test_an_api_server_that_is_silent_is_503(
    desk: Desk, worker: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS_TO_REVIEW", 0.01)
    with desk.api_server_held():
        status, answer = await post(worker)
    assert (status, answer) == (503, {"message": "the API server was not heard from in time"})


async def test_a_job_may_report_five_times_at_once_and_then_every_second(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    assert [(await post(worker))[0] for _ in range(6)] == [200] * 5 + [429]
    async with worker.post(TRAINER_STATUS, headers=BEARER, json={}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert "job default/digits may report 1 times a second" in (await response.json())["message"]
    desk.seconds = 1.0
    assert [(await post(worker))[0] for _ in range(2)] == [200, 429]


async def test_nobody_else_can_use_up_a_jobs_reports(desk: Desk, worker: TestClient[Any, Any]) -> None:
    for _ in range(10):
        await post(worker, headers={"Authorization": "Bearer garbage"})
    assert (await post(worker))[0] == 200


async def test_an_address_whose_tokens_are_refused_is_soon_asked_to_wait(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    heard = [(await post(worker, headers={"Authorization": f"Bearer {number}"}))[0] for number in range(25)]
    assert heard == [401] * 20 + [429] * 5
    assert desk.cluster.asked["TokenReview"] == 20
    desk.seconds = 5.0
    assert (await post(worker))[0] == 200


async def test_a_worker_whose_token_is_known_is_not_locked_out_by_others_behind_its_address(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    assert (await post(worker))[0] == 200
    for number in range(21):
        last = await post(worker, headers={"Authorization": f"Bearer {number}"})
    assert last[0] == 429
    assert (await post(worker))[0] == 200


async def test_a_worker_with_an_expired_token_that_costs_no_look_does_not_use_up_its_address(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    heard = [(await post(worker, headers={"Authorization": "Bearer expired"}))[0] for _ in range(25)]
    assert heard == [401] * 25
    assert (await post(worker))[0] == 200


async def test_a_report_that_fails_through_us_makes_the_silence_of_all_jobs_ours(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    desk.now = LATER
    await post(worker, headers={"Authorization": "Bearer garbage"})
    await post(worker, data=b"no report")
    assert desk.inboxes.of(JobKey("default", "letters")).listening_since == NOW
    desk.cluster.error = Unavailable(503, "Slow", "etcd is slow")
    await post(worker, headers={"Authorization": "Bearer renewed"})
    assert desk.inboxes.of(JobKey("default", "letters")).listening_since == LATER


async def test_of_too_many_reports_at_once_the_last_ones_come_again_later(
    desk: Desk, worker: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_REQUESTS_AT_ONCE", 2)
    desk.cluster.tokens["renewed"] = desk.cluster.tokens["token"]
    bearers = (BEARER, {"Authorization": "Bearer renewed"})
    with desk.api_server_held():
        first, second = (asyncio.create_task(post(worker, headers=bearer)) for bearer in bearers)
        await until(lambda: desk.cluster.asked["TokenReview"] == 2)
        assert await post(worker) == (503, {"message": "too many reports at once"})
    assert [(await first)[0], (await second)[0]] == [200, 200]
    assert (await post(worker))[0] == 200


# On the wire

SERVICE_HOST = "operator.tpu-system.svc"


class Wire:
    """The service behind TLS on a port of its own, and connections to it."""

    def __init__(self, port: int, client: ssl.SSLContext) -> None:
        self.port = port
        self.client = client

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(LOOPBACK, self.port, ssl=self.client, server_hostname=SERVICE_HOST)

    async def say(self, text: bytes) -> bytes:
        """What is answered until the server hangs up."""
        async with asyncio.timeout(SECONDS):
            reader, writer = await self.open()
            writer.write(text)
            answer = await reader.read()
            writer.close()
            return answer

    async def post(self) -> int:
        async with aiohttp.ClientSession(headers=BEARER) as session:
            url = f"https://{LOOPBACK}:{self.port}{PROGRESS}"
            async with session.post(url, json=GOOD, ssl=self.client, server_hostname=SERVICE_HOST) as response:
                return response.status


@asynccontextmanager
async def served(desk: Desk) -> AsyncIterator[Wire]:
    authority, port = new_authority("progress", datetime.now(UTC)), unused_port()
    async with server_tls(authority, (SERVICE_HOST,), lambda: datetime.now(UTC)) as tls, serve(desk.service, port, tls):
        yield Wire(port, trusting(authority))


def request(*lines: str, body: bytes = b"") -> bytes:
    head = (f"POST {PROGRESS} HTTP/1.1", "Host: operator", "Authorization: Bearer token", *lines)
    return "\r\n".join((*head, "", "")).encode() + body


async def test_a_report_is_taken_over_tls_and_the_port_is_free_afterwards(desk: Desk) -> None:
    async with served(desk) as wire:
        assert await wire.post() == 200
    assert desk.hints == [KEY]
    with pytest.raises(ConnectionRefusedError):
        await wire.open()


async def test_what_is_no_tls_or_no_http_leaves_no_trace(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    async with served(desk) as wire:
        reader, writer = await asyncio.open_connection(LOOPBACK, wire.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
        for garbage in (b"\x00" * 100, b"hello\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", request("x: " + "y" * 20_000)):
            assert b"400 Bad Request" in await wire.say(garbage + b"\r\n\r\n")
        assert await wire.post() == 200
    assert caplog.records == []


async def test_a_token_that_is_no_text_is_401(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    async with served(desk) as wire:
        said = request("Connection: close", "Content-Length: 0").replace(b"Bearer token", b"Bearer t\xf6ken")
        answer = await wire.say(said)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert caplog.records == []


async def test_a_worker_that_does_not_trust_us_disturbs_nobody(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    async with served(desk) as wire:
        stranger = Wire(wire.port, trusting(new_authority("progress", datetime.now(UTC))))
        with pytest.raises(ssl.SSLCertVerificationError):
            await stranger.open()
        assert await wire.post() == 200
    assert caplog.records == []


@pytest.mark.parametrize("beginning", [b"", request("Content-Length: 10")[:-2]], ids=["nothing", "half a head"])
async def test_whoever_says_nothing_is_hung_up_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(module, "_SECONDS_OF_SILENCE", 0.05)
    async with served(desk) as wire:
        assert await wire.say(beginning) == b""


async def test_whoever_does_not_shake_hands_is_hung_up_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_SECONDS_TO_SHAKE_HANDS", 0.05)
    async with served(desk) as wire, asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(LOOPBACK, wire.port)
        assert await reader.read() == b""
        writer.close()
    assert caplog.records == []


async def test_a_body_that_does_not_come_is_408(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_TO_READ", 0.05)
    monkeypatch.setattr(module, "_SECONDS_TO_DRAIN", 0.05)
    async with served(desk) as wire:
        answer = await wire.say(request("Content-Length: 10", body=b"half"))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within" in answer


async def test_a_body_that_is_cut_off_disturbs_nobody(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    async with served(desk) as wire:
        _, writer = await wire.open()
        writer.write(request("Content-Length: 10", body=b"half"))
        await until(lambda: desk.cluster.asked["TPUTrainingJob"] == 1)
        writer.transport.abort()
        _, writer = await wire.open()
        writer.write(request("Transfer-Encoding: chunked", body=b"no chunk\r\n"))
        assert await wire.post() == 200
        writer.transport.abort()
    assert desk.inbox.report is not None
    assert caplog.records == []


async def test_a_packed_body_is_not_unpacked(desk: Desk) -> None:
    bomb = gzip.compress(b" " * 50_000_000 + json.dumps(GOOD).encode())
    assert len(bomb) < MOST_BYTES
    async with served(desk) as wire:
        answer = await wire.say(
            request(f"Content-Length: {len(bomb)}", "Content-Encoding: gzip", "Connection: close", body=bomb)
        )
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_connection_is_closed_after_the_answer(desk: Desk) -> None:
    async with served(desk) as wire:
        answer = await wire.say(request("Content-Length: 0"))
    assert b"\r\nConnection: close\r\n" in answer


@pytest.mark.parametrize("limit", ["MOST_CONNECTIONS", "MOST_CONNECTIONS_PER_ADDRESS"])
async def test_a_connection_too_many_is_closed(desk: Desk, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(module, limit, 2)
    async with served(desk) as wire:
        kept = [await wire.open() for _ in range(2)]
        with pytest.raises(ConnectionError):
            await wire.open()
        for _, writer in kept:
            writer.write(request("Content-Length: 0"))
        for reader, writer in kept:
            assert b" 400 " in await reader.readline()
            writer.transport.abort()


async def test_whoever_does_not_shake_hands_takes_a_place_until_it_has_left(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 2)
    async with served(desk) as wire, asyncio.timeout(SECONDS):
        silent = [(await asyncio.open_connection(LOOPBACK, wire.port))[1] for _ in range(2)]
        with pytest.raises(ConnectionError):
            await wire.open()
        for writer in silent:
            writer.close()
        while True:
            with suppress(ConnectionError, aiohttp.ClientError):
                assert await wire.post() == 200
                break


async def test_to_turn_somebody_away_for_want_of_room_is_not_to_have_listened(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 0)
    async with served(desk) as wire:
        desk.now = LATER
        with pytest.raises(ConnectionError):
            await wire.open()
    assert desk.inbox.listening_since == LATER


async def test_one_address_that_takes_its_room_up_makes_nobody_deaf(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS_PER_ADDRESS", 0)
    async with served(desk) as wire:
        desk.now = LATER
        with pytest.raises(ConnectionError):
            await wire.open()
    assert desk.inbox.listening_since == NOW
