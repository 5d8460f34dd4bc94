"""The progress service as a worker meets it: what is taken in, and how it says no to everything else."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from syrupy.assertion import SnapshotAssertion

from tests.unit.jobs import job_body
from tests.unit.progress_desk import BEARER, GOOD, KEY, LATER, NOW, PROGRESS, SECONDS, TRAINER_STATUS, Desk
from tpu_contract.protocol import REPORT_LIMIT
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.kube.errors import NotFound, Unavailable
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.progress import server as module


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


# Taken in


async def test_a_report_reaches_the_inbox_and_enqueues_the_job(desk: Desk, worker: TestClient[Any, Any]) -> None:
    assert await post(worker, json=GOOD | {"loss": 0.25}) == (200, {"stacks": False})
    report = desk.inbox.report
    assert (report.step, report.loss, report.attempt, report.received) == (7, "0.25", 1, NOW)
    assert desk.hints == [KEY]


async def test_kubeflow_trainers_report_reaches_the_same_inbox(desk: Desk, worker: TestClient[Any, Any]) -> None:
    status = {"progressPercentage": 50, "metrics": [{"name": "current_step", "value": "150"}]}
    assert await post(worker, TRAINER_STATUS, json={"trainerStatus": status}) == (200, {})
    report = desk.inbox.report
    assert report.step == 150
    assert desk.hints == [KEY]


async def test_a_worker_is_asked_for_its_stacks_until_they_are_there(desk: Desk, worker: TestClient[Any, Any]) -> None:
    desk.inboxes.ask_for_stacks(KEY)
    assert await post(worker) == (200, {"stacks": True})
    assert await post(worker, json=GOOD | {"stacks": "Thread 1: ..."}) == (200, {"stacks": False})


async def test_the_longest_allowed_report_is_accepted(worker: TestClient[Any, Any]) -> None:
    body = json.dumps(GOOD).encode()
    assert (await post(worker, data=body + b" " * (REPORT_LIMIT - len(body))))[0] == 200


# ReportRefused


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
async def test_a_missing_or_bad_token_is_401(
    desk: Desk, worker: TestClient[Any, Any], headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await post(worker, headers=headers)
    assert status == 401
    assert "token" in answer["message"]
    assert desk.inbox.report is None
    assert caplog.records == []


async def test_another_jobs_worker_is_403(
    desk: Desk, worker: TestClient[Any, Any], snapshot: SnapshotAssertion
) -> None:
    desk.cluster.put(job_body({"metadata.name": "letters", "metadata.uid": "of-letters"}))
    path = PROGRESS.replace("digits", "letters")
    status, answer = await post(worker, path)
    assert status == 403
    assert answer["message"] == snapshot


async def test_a_job_that_is_gone_is_404(desk: Desk, worker: TestClient[Any, Any]) -> None:
    desk.cluster.faults["get TPUTrainingJob"] = NotFound(404, "NotFound", "not found")
    assert await post(worker) == (404, {"message": "job digits is gone"})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"phase": "Training", "step": "7"}'])
async def test_a_malformed_report_is_400_with_the_reason(
    desk: Desk, worker: TestClient[Any, Any], body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await post(worker, data=body)
    assert (status, set(answer)) == (400, {"message"})
    assert desk.inbox.report is None
    assert desk.hints == []
    assert caplog.records == []


async def test_a_longer_report_is_413_with_or_without_a_content_length(worker: TestClient[Any, Any]) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(REPORT_LIMIT // 1024 + 1):
            yield b" " * 1024

    too_long = (413, {"message": f"the body is longer than {REPORT_LIMIT} bytes"})
    assert await post(worker, data=b" " * (REPORT_LIMIT + 1)) == too_long
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
async def test_unknown_paths_and_methods_are_answered_in_json(
    worker: TestClient[Any, Any], method: str, path: str, status: int
) -> None:
    async with worker.request(method, path, headers=BEARER) as response:
        assert response.status == status
        assert "reports are POSTed to" in (await response.json())["message"]


# Later


async def test_an_unreachable_api_server_is_503(desk: Desk, worker: TestClient[Any, Any]) -> None:
    desk.cluster.faults["*"] = Unavailable(0, "TokenNotReviewed", "no route")
    async with worker.post(PROGRESS, headers=BEARER, json=GOOD) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "5")
        assert "no route" in (await response.json())["message"]


async def test_a_token_that_waits_too_long_for_review_is_429(
    desk: Desk, worker: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(module, "_SECONDS_TO_REVIEW", 0.01)
    with desk.api_server_held():
        status, answer = await post(worker)
    assert status == 429
    assert answer == snapshot
    assert desk.inbox.last_loss is None


async def test_a_job_may_report_five_times_at_once_and_then_every_second(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    assert [(await post(worker))[0] for _ in range(6)] == [200] * 5 + [429]
    async with worker.post(TRAINER_STATUS, headers=BEARER, json={}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert "default/digits" in (await response.json())["message"]
    desk.seconds = 1.0
    assert [(await post(worker))[0] for _ in range(2)] == [200, 429]


async def test_nobody_else_can_use_up_a_jobs_reports(desk: Desk, worker: TestClient[Any, Any]) -> None:
    for _ in range(10):
        await post(worker, headers={"Authorization": "Bearer garbage"})
    assert (await post(worker))[0] == 200


async def test_a_known_token_still_works_from_an_address_with_too_many_refusals(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    assert (await post(worker))[0] == 200
    for number in range(21):
        last = await post(worker, headers={"Authorization": f"Bearer {number}"})
    assert last[0] == 429
    assert (await post(worker))[0] == 200


async def test_a_remembered_refusal_does_not_count_against_the_address(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    heard = [(await post(worker, headers={"Authorization": "Bearer expired"}))[0] for _ in range(25)]
    assert heard == [401] * 25
    assert (await post(worker))[0] == 200


async def test_an_api_server_that_does_not_answer_affects_only_the_job_of_the_report(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    desk.now = LATER
    desk.cluster.faults["*"] = Unavailable(503, "Slow", "etcd is slow")
    await post(worker)
    assert desk.inbox.last_loss == LATER
    assert desk.inboxes.of(JobKey("default", "letters")).last_loss is None


async def test_a_report_lost_by_our_own_error_is_500_logged_and_noted_for_its_job(
    desk: Desk, worker: TestClient[Any, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inboxes, "put", lambda *_: 1 // 0)
    desk.now = LATER
    status, answer = await post(worker)
    assert (status, "see the operator's log" in answer["message"], len(caplog.records)) == (500, True, 1)
    assert desk.inbox.last_loss == LATER


async def test_a_flood_of_invalid_tokens_costs_twenty_reviews_and_affects_no_job(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    desk.now = LATER
    garbage = [{"Authorization": f"Bearer {number}"} for number in range(45)]
    answers = await asyncio.gather(*(post(worker, headers=bearer) for bearer in garbage))
    assert sorted(status for status, _ in answers) == [401] * 20 + [429] * 25
    assert desk.cluster.count()["create TokenReview"] == 20
    assert desk.inbox.last_loss is None


@pytest.mark.parametrize("body", [b"no report", b" " * (REPORT_LIMIT + 1)], ids=["no report", "too long"])
async def test_a_bad_report_does_not_excuse_the_silence_of_its_job(
    desk: Desk, worker: TestClient[Any, Any], body: bytes
) -> None:
    await post(worker, data=body)
    assert desk.inbox.last_loss is None


async def test_many_workers_behind_one_address_are_all_accepted(desk: Desk, worker: TestClient[Any, Any]) -> None:
    """Accepted tokens do not count as refusals, however many of them are new."""
    bearers = [{"Authorization": f"Bearer {number}"} for number in range(100)]
    desk.cluster.reviews = {str(number): desk.cluster.reviews["token"] for number in range(100)}
    heard = []
    for desk.seconds, bearer in enumerate(bearers):
        heard.append((await post(worker, headers=bearer))[0])
    assert heard == [200] * 100


async def test_a_long_outage_of_the_api_server_does_not_count_against_the_address(
    desk: Desk, worker: TestClient[Any, Any]
) -> None:
    desk.cluster.faults["*"] = Unavailable(503, "Slow", "etcd is slow")
    assert {(await post(worker))[0] for _ in range(50)} == {503}
    desk.cluster.faults.clear()
    assert (await post(worker))[0] == 200


async def test_an_impossible_name_is_404(desk: Desk, worker: TestClient[Any, Any]) -> None:
    desk.cluster.faults["*"] = Unavailable(503, "Slow", "etcd is slow")
    assert (await post(worker, PROGRESS.replace("digits", "d" * 254)))[0] == 404
