"""`tpujob logs --follow` prints each line once and in order, whatever ends a connection or a worker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from syrupy.assertion import SnapshotAssertion

from tests.cluster.deadlines import deadline
from tests.fakes.api_server import credentials_for, refuses
from tests.fakes.watched_cluster import WatchedCluster, breaks_off, selected, served, streams
from tests.unit.pods import ended, pod, ready
from tests.unit.seen_jobs import JOBS, condition, seen_job
from tpu_training_operator.cli.common.cluster import OPTIONS
from tpu_training_operator.cli.watch import log_reader
from tpu_training_operator.cli.watch.log_reader import JobNow, LogReader, NoLog
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.kube import cluster as kinds
from tpu_training_operator.kube import informer
from tpu_training_operator.kube.client import connect
from tpu_training_operator.kube.cluster import JobKey, Object
from tpu_training_operator.kube.errors import Forbidden, Unavailable

HOST_0, HOST_1 = WorkerId(1, 0, 0), WorkerId(1, 0, 1)
SUCCEEDED = JOBS["succeeded"].job
# Seconds after which a test fails that would otherwise wait forever.
PATIENCE = 30


@dataclass
class Kept:
    """Keeps what it gets."""

    logs: dict[WorkerId, bytes] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, worker: WorkerId, lines: list[bytes]) -> None:
        self.logs[worker] = self.logs.get(worker, b"") + b"".join(line + b"\n" for line in lines)
        self.heard.set()

    def say(self, text: str) -> None:
        self.told.append(text)
        self.heard.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(deadline(PATIENCE)):
            while not holds():
                self.heard.clear()
                await self.heard.wait()


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(log_reader, "_FIRST_PAUSE", 0.0)


@pytest.fixture
async def cluster() -> AsyncIterator[WatchedCluster]:
    async with served(WatchedCluster()) as started:
        yield started


@pytest.fixture
async def logs(cluster: WatchedCluster) -> AsyncIterator[Callable[..., LogReader]]:
    async with connect(credentials_for(cluster.url), OPTIONS) as client:

        def of(sink: Kept, **options: int) -> LogReader:
            job = JobNow.of(cluster.store.body(kinds.JOBS, "digits"))
            return LogReader(client, JobKey("default", "digits"), job, sink.write, sink.say, **options)

        yield of


def log_of(*texts: str, minute: int = 0) -> bytes:
    """A line a second."""
    lines = (f"2026-01-15T12:{minute:02}:{second:02}.5Z {text}\n" for second, text in enumerate(texts))
    return "".join(lines).encode()


async def followed(reader: LogReader, *workers: WorkerId, further_attempts: bool = True) -> None:
    async with asyncio.timeout(deadline(PATIENCE)):
        await reader.follow(workers, further_attempts=further_attempts)


LINES = [f"line {number}" for number in range(10)]
TEXT = "".join(f"{line}\n" for line in LINES).encode()


def finished(cluster: WatchedCluster, *workers: Object) -> None:
    cluster.show(SUCCEEDED, *(ended(body) for body in workers))


async def test_the_whole_log_of_an_ended_worker_is_shown(
    cluster: WatchedCluster, logs: Callable[..., LogReader]
) -> None:
    finished(cluster, pod(0))
    cluster.logs["digits-1-0-0"] = log_of(*LINES)
    sink = Kept()
    await followed(logs(sink), HOST_0)
    assert (sink.logs, sink.told) == ({HOST_0: TEXT}, [])


@pytest.mark.parametrize("cut", [0, 10, 30, 31, 40, 45, 46, 47, 100, len(log_of(*LINES)) - 1])
async def test_a_connection_reset_within_a_line_prints_that_line_once(
    cluster: WatchedCluster, logs: Callable[..., LogReader], cut: int
) -> None:
    finished(cluster, pod(0))
    log = cluster.logs["digits-1-0-0"] = log_of(*LINES)
    cluster.faults["log digits-1-0-0"] = [breaks_off(log[:cut])]
    sink = Kept()
    await followed(logs(sink), HOST_0)
    assert sink.logs == {HOST_0: TEXT}
    assert len(sink.told) == 1
    assert "connection lost" in sink.told[0]


async def test_after_a_break_only_the_missing_lines_are_requested(
    cluster: WatchedCluster, logs: Callable[..., LogReader]
) -> None:
    finished(cluster, pod(0))
    log = cluster.logs["digits-1-0-0"] = log_of(*LINES)
    cluster.faults["log digits-1-0-0"] = [breaks_off(log[: log.index(b"line 7")])]
    await followed(logs(Kept()), HOST_0)
    assert [query.get("sinceTime") for query in cluster.queries("log digits-1-0-0")] == [None, "2026-01-15T12:00:06.5Z"]


async def test_no_line_after_the_tail_is_lost(cluster: WatchedCluster, logs: Callable[..., LogReader]) -> None:
    finished(cluster, pod(0))
    log = cluster.logs["digits-1-0-0"] = log_of(*LINES)

    async def tail_then_reset(request: web.Request) -> web.StreamResponse:
        return await breaks_off(selected(log, request.query)[:-20])(request)

    cluster.faults["log digits-1-0-0"] = [tail_then_reset]
    sink = Kept()
    await followed(logs(sink, tail=3), HOST_0)
    assert sink.logs == {HOST_0: b"line 7\nline 8\nline 9\n"}


async def test_a_stream_that_ends_while_its_worker_runs_is_opened_again(
    cluster: WatchedCluster, logs: Callable[..., LogReader]
) -> None:
    cluster.show(seen_job(), ready(pod(0)))
    log = cluster.logs["digits-1-0-0"] = log_of(*LINES)
    asked = asyncio.Event()

    async def the_worker_ends(request: web.Request) -> web.StreamResponse:
        asked.set()
        finished(cluster, pod(0))
        return await streams(log[:160])(request)

    # Clean ends, as of an API server that is stopped: the last one after the worker has ended.
    cluster.faults["log digits-1-0-0"] = [streams(log[:50]), streams(log[:90]), the_worker_ends]
    sink = Kept()
    await followed(logs(sink), HOST_0)
    assert (sink.logs, sink.told) == ({HOST_0: TEXT}, [])
    assert asked.is_set()


async def test_the_log_of_a_silent_worker_is_reopened_quietly(
    cluster: WatchedCluster, logs: Callable[..., LogReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "_SILENT_SECONDS", 0.05)
    finished(cluster, pod(0))
    log = cluster.logs["digits-1-0-0"] = log_of(*LINES)
    over = asyncio.Event()

    async def falls_silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(log[:50])
        await over.wait()
        return response

    cluster.faults["log digits-1-0-0"] = [falls_silent]
    sink = Kept()
    await followed(logs(sink), HOST_0)
    over.set()
    assert (sink.logs, sink.told) == ({HOST_0: TEXT}, [])


async def test_waiting_for_a_worker_to_start_is_reported_once(
    cluster: WatchedCluster, logs: Callable[..., LogReader], snapshot: SnapshotAssertion
) -> None:
    cluster.show(seen_job("Starting"), pod(0))
    cluster.logs["digits-1-0-0"] = None
    sink = Kept()
    following = asyncio.create_task(followed(logs(sink), HOST_0))
    await sink.until(lambda: bool(sink.told))
    cluster.logs["digits-1-0-0"] = log_of(*LINES)
    finished(cluster, pod(0))
    await following
    assert sink.logs == {HOST_0: TEXT}
    assert sink.told == snapshot


async def test_the_same_hosts_of_the_next_attempt_follow(
    cluster: WatchedCluster, logs: Callable[..., LogReader]
) -> None:
    cluster.show(seen_job(), ended(pod(0), 1), ended(pod(1), 1))
    for host in (0, 1):
        cluster.logs[f"digits-1-0-{host}"] = log_of(f"first {host}")
    sink = Kept()
    following = asyncio.create_task(followed(logs(sink), HOST_0, HOST_1))
    await sink.until(lambda: len(sink.logs) == 2)

    cluster.logs = {f"digits-2-0-{host}": log_of(f"second {host}", minute=5) for host in (0, 1)}
    cluster.show(seen_job("Restarting", attempt=2), *(ended(pod(host, attempt=2)) for host in (0, 1)))
    await sink.until(lambda: len(sink.logs) == 4)
    cluster.show({**SUCCEEDED, "status": {**SUCCEEDED["status"], "attempt": 2}})
    await following

    assert sink.logs == {
        WorkerId(attempt, 0, host): f"{word} {host}\n".encode()
        for attempt, word in ((1, "first"), (2, "second"))
        for host in (0, 1)
    }
    assert sink.told == ["attempt 2 follows"]


async def test_a_chosen_attempt_is_followed_only_to_its_end(
    cluster: WatchedCluster, logs: Callable[..., LogReader]
) -> None:
    cluster.show(seen_job(), ended(pod(0), 1))
    cluster.logs["digits-1-0-0"] = log_of(*LINES)
    sink = Kept()
    await followed(logs(sink), HOST_0, further_attempts=False)
    assert sink.logs == {HOST_0: TEXT}


@pytest.mark.parametrize(
    "over",
    [
        lambda cluster: cluster.show(SUCCEEDED),
        lambda cluster: cluster.remove(kinds.JOBS, "digits"),
        lambda cluster: cluster.show(
            {**seen_job("Starting"), "metadata": {**seen_job()["metadata"], "uid": "another job of that name"}}
        ),
    ],
    ids=["finished", "deleted", "replaced"],
)
async def test_the_end_of_the_job_ends_the_wait_for_a_worker(
    cluster: WatchedCluster, logs: Callable[..., LogReader], over: Callable[[WatchedCluster], None]
) -> None:
    cluster.show(seen_job("Starting"))
    sink = Kept()
    following = asyncio.create_task(followed(logs(sink), HOST_0))
    await sink.until(lambda: bool(sink.told))
    over(cluster)
    await following
    assert sink.logs == {}


async def test_a_forbidden_log_ends_the_command(cluster: WatchedCluster, logs: Callable[..., LogReader]) -> None:
    cluster.show(seen_job(), ready(pod(0)), ready(pod(1)))
    cluster.faults["log digits-1-0-1"] = [refuses(403, "Forbidden", "pods/log")]
    cluster.logs["digits-1-0-0"] = log_of(*LINES)
    with pytest.raises(Forbidden, match="pods/log"):
        await followed(logs(Kept()), HOST_0, HOST_1)


async def test_a_forbidden_watch_ends_the_command(cluster: WatchedCluster, logs: Callable[..., LogReader]) -> None:
    cluster.show(seen_job(), ready(pod(0)))
    cluster.logs["digits-1-0-0"] = None
    cluster.faults["list tputrainingjobs"] = [refuses(403, "Forbidden", "cannot list")]
    with pytest.raises(Forbidden, match="cannot list"):
        await followed(logs(Kept()), HOST_0)


# Without --follow


async def test_several_logs_are_shown_one_after_the_other(
    cluster: WatchedCluster, logs: Callable[..., LogReader]
) -> None:
    cluster.show(seen_job(), ready(pod(0)), ready(pod(1)))
    cluster.logs = {"digits-1-0-0": log_of("zero"), "digits-1-0-1": log_of("one")}
    cluster.faults["log digits-1-0-1"] = [breaks_off(log_of("one")[:-2])]
    sink = Kept()
    await logs(sink).show([HOST_0, HOST_1])
    assert [*sink.logs.items()] == [(HOST_0, b"zero\n"), (HOST_1, b"one\n")]
    assert [query["follow"] for query in cluster.queries("log digits-1-0-1")] == ["false", "false"]


@pytest.mark.parametrize(
    "prepare",
    [
        lambda cluster: None,
        lambda cluster: cluster.logs.update({"digits-1-0-0": None}),
    ],
    ids=["no pod", "not started"],
)
async def test_a_missing_log_is_explained(
    cluster: WatchedCluster,
    logs: Callable[..., LogReader],
    prepare: Callable[[WatchedCluster], Awaitable[None]],
    snapshot: SnapshotAssertion,
) -> None:
    cluster.show(seen_job())
    prepare(cluster)
    with pytest.raises(NoLog) as raised:
        await logs(Kept()).show([HOST_0])
    assert str(raised.value) == snapshot


async def test_an_unreachable_node_is_given_up_after_five_tries(
    cluster: WatchedCluster, logs: Callable[..., LogReader]
) -> None:
    cluster.show(seen_job())
    cluster.faults["log digits-1-0-0"] = [refuses(500, "InternalError", "dial tcp: connection refused")] * 9
    sink = Kept()
    with pytest.raises(Unavailable, match="connection refused"):
        await logs(sink).show([HOST_0])
    assert len(cluster.queries("log digits-1-0-0")) == 5


def test_a_failed_job_is_over(cluster: WatchedCluster) -> None:
    failed = condition("Failed", "True", "RestartLimitReached", "too often")
    assert JobNow.of(seen_job("Failed", also=(failed,))).has_finished
    assert not JobNow.of(seen_job()).has_finished
