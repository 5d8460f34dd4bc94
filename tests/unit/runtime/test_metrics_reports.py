"""Reports of workers are counted by their answer, whichever part of the service refused them."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.unit.scrape import counted
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.progress.server import REPORTS_AT_ONCE, ProgressServer
from tpu_training_operator.runtime.progress.tokens import ReportRefused, Reviewer, Sender

PATH = "/apis/tpu-operator.dev/v1alpha1/namespaces/default/tputrainingjobs/digits/progress"
GOOD = {"phase": "Training", "step": 7}
NOW = datetime(2026, 1, 15, 12, tzinfo=UTC)


class Door:
    """Lets every worker in, or refuses it with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.is_known = True

    def trusts(self, token: str) -> bool:
        return self.is_known

    async def sender(self, token: str, key: JobKey, address: str) -> Sender:
        if self.status != 200:
            raise ReportRefused(self.status, "no")
        return Sender(key.name, attempt=1, pod_uid="uid-1", total_steps=300)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
async def worker(metrics: Metrics, door: Door) -> AsyncIterator[TestClient[Any, Any]]:
    service = ProgressServer(
        reviewer=cast("Reviewer", door),
        inboxes=Inboxes(lambda: NOW),
        enqueue=lambda key, seconds: None,
        clock=lambda: NOW,
        seconds=lambda: 0.0,
        metrics=metrics,
    )
    async with TestClient(TestServer(service.application())) as client:
        yield client


async def reports(worker: TestClient[Any, Any], path: str = PATH, **body: Any) -> None:
    async with worker.post(path, headers={"Authorization": "Bearer token"}, **(body or {"json": GOOD})):
        pass


def answers(metrics: Metrics) -> dict[str, float]:
    return counted(metrics, "tpujob_progress_reports_total", "result")


@pytest.mark.parametrize(
    ("status", "result"),
    [(200, "accepted"), (401, "unauthenticated"), (403, "forbidden"), (404, "not_found"), (503, "unavailable")],
)
async def test_a_report_is_counted_by_its_answer(
    worker: TestClient[Any, Any], metrics: Metrics, door: Door, status: int, result: str
) -> None:
    door.status = status
    await reports(worker)
    assert answers(metrics) == {result: 1}


@pytest.mark.parametrize("status", [401, 403, 404, 429])
async def test_a_refusal_of_a_sender_that_was_never_accepted_is_counted_apart(
    worker: TestClient[Any, Any], metrics: Metrics, door: Door, status: int
) -> None:
    door.status, door.is_known = status, False
    await reports(worker)
    assert answers(metrics) == {"stranger": 1}


async def test_an_unreadable_report_is_malformed(worker: TestClient[Any, Any], metrics: Metrics) -> None:
    await reports(worker, data=b"step 7")
    assert answers(metrics) == {"malformed": 1}


async def test_a_report_that_is_too_long_is_too_large(worker: TestClient[Any, Any], metrics: Metrics) -> None:
    await reports(worker, data=b" " * 70_000)
    assert answers(metrics) == {"too_large": 1}


async def test_more_reports_than_allowed_are_too_many(worker: TestClient[Any, Any], metrics: Metrics) -> None:
    for _ in range(REPORTS_AT_ONCE + 2):
        await reports(worker)
    assert answers(metrics) == {"accepted": REPORTS_AT_ONCE, "too_many": 2}


async def test_a_report_to_nowhere_is_not_found(worker: TestClient[Any, Any], metrics: Metrics) -> None:
    await reports(worker, "/nowhere")
    assert answers(metrics) == {"stranger": 1}
