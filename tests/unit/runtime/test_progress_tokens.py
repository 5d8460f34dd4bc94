"""Whose word counts: the token's pod must be worker 0 of the very job that the report is about."""

import asyncio
from typing import Any

import pytest

from tests.fakes.clock import Clock
from tests.fakes.cluster import FakeCluster
from tests.fakes.held_requests import settle
from tests.unit.pods import pod
from tests.unit.reviewing_cluster import POD_NAME, POD_UID, RESOLVED, begun_job, reviewing_cluster, token_of
from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.kube.cluster import JobKey, Object
from tpu_training_operator.kube.errors import ApiError, Forbidden, NotFound, Unavailable
from tpu_training_operator.runtime.progress import tokens as module
from tpu_training_operator.runtime.progress.tokens import (
    MOST_QUESTIONS,
    MOST_QUESTIONS_PER_ADDRESS,
    ReportRefused,
    Reviewer,
    Sender,
    TokenNotReviewed,
)

KEY = JobKey("default", "digits")
ADDRESS = "10.0.0.1"
ONE_REVIEW = ["create TokenReview", "get Pod", "get TPUTrainingJob"]
LEADER = Sender("digits", attempt=1, pod_uid="uid-of-digits-1-0-0", total_steps=None)


def reviewer(cluster: FakeCluster, clock: Clock | None = None) -> Reviewer:
    return Reviewer(cluster, clock or Clock(1000.0))


def failing(error: ApiError) -> FakeCluster:
    cluster = reviewing_cluster()
    cluster.faults["*"] = error
    return cluster


def held(is_over: asyncio.Event) -> FakeCluster:
    """A cluster that answers when the event is set."""
    cluster = reviewing_cluster()
    cluster.hooks["*"] = is_over.wait
    return cluster


async def refusal(cluster: FakeCluster, token: str = "token", key: JobKey = KEY) -> ReportRefused:
    with pytest.raises(ReportRefused) as raised:
        await reviewer(cluster).sender(token, key, ADDRESS)
    return raised.value


def changed(body: Object, **metadata: Any) -> Object:
    return {**body, "metadata": {**body["metadata"], **metadata}}


async def test_worker_0_is_known_by_its_pod() -> None:
    assert await reviewer(reviewing_cluster()).sender("token", KEY, ADDRESS) == LEADER


async def test_the_attempt_comes_from_the_pod() -> None:
    old = pod(attempt=3)
    cluster = reviewing_cluster([begun_job({"status.attempt": 4}), old], {"token": token_of(old)})
    assert (await reviewer(cluster).sender("token", KEY, ADDRESS)).attempt == 3


async def test_the_number_of_steps_comes_from_the_status() -> None:
    cluster = reviewing_cluster([begun_job({"status.resolved": RESOLVED}), pod()])
    assert (await reviewer(cluster).sender("token", KEY, ADDRESS)).total_steps == 300


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"authenticated": False},
        token_of(pod(), authenticated=False),
        token_of(pod(), audiences=["https://kubernetes.default.svc"]),
        token_of(pod(), audiences=None),
        {key: value for key, value in token_of(pod()).items() if key != "audiences"},
    ],
    ids=["no answer", "not authenticated", "expired", "another audience", "null", "an authenticator without audiences"],
)
async def test_a_token_that_is_not_for_us_is_401(status: Object) -> None:
    cluster = reviewing_cluster(tokens={"token": status})
    assert (await refusal(cluster)).status == 401
    assert cluster.requests == ["create TokenReview"]


@pytest.mark.parametrize(
    "user",
    [
        {},
        {"username": "admin"},
        {"username": "admin", "extra": {POD_NAME: ["digits-1-0-0"], POD_UID: ["uid-of-digits-1-0-0"]}},
        {"username": "system:serviceaccount:default:default"},
        {"username": "system:serviceaccount:default:default", "extra": {POD_NAME: ["digits-1-0-0"]}},
        {"username": "system:serviceaccount:default:default", "extra": {POD_NAME: [], POD_UID: []}},
    ],
    ids=["nobody", "a user", "a user who claims a pod", "unbound", "no uid", "empty"],
)
async def test_a_token_without_a_pod_is_403(user: Object) -> None:
    refused = await refusal(reviewing_cluster(tokens={"token": token_of(pod(), user=user)}))
    assert (refused.status, "not bound to a pod" in str(refused)) == (403, True)


WORKER_1, SECOND_SLICE = pod(host=1), pod(slice_index=1)
OWNER = pod()["metadata"]["ownerReferences"][0]
RENAMED = changed(pod(), name="letters-1-0-0", ownerReferences=[{**OWNER, "name": "letters"}])
# Their owner references and labels are copied from worker 0's.
OTHER_NAME = changed(pod(), name="mine")
OTHER_JOBS_LABEL = changed(pod(), name="x-1-0-0", labels=pod()["metadata"]["labels"] | {LABEL_JOB_NAME: "x"})
NEXT_ATTEMPT = pod(attempt=3)
STRANGERS = {
    "another worker": ([begun_job(), WORKER_1], WORKER_1, "not worker 0"),
    "another slice": ([begun_job(), SECOND_SLICE], SECOND_SLICE, "not worker 0"),
    "no owner": ([begun_job(), changed(pod(), ownerReferences=[])], pod(), "is not a worker of a TPUTrainingJob"),
    "another kind of owner": (
        [changed(pod(), ownerReferences=[{"kind": "Job", "name": "digits", "uid": "1", "controller": True}])],
        pod(),
        "is not a worker of a TPUTrainingJob",
    ),
    "an owner that does not control": (
        [changed(pod(), ownerReferences=[{**OWNER, "controller": False}])],
        pod(),
        "is not a worker of a TPUTrainingJob",
    ),
    "another job": (
        [begun_job({"metadata.name": "letters"}), RENAMED],
        RENAMED,
        "pod letters-1-0-0 belongs to job letters, not digits",
    ),
    "a namesake of its job": (
        [begun_job({"metadata.uid": "another"}), pod()],
        pod(),
        "is not a worker of the present",
    ),
    "the name of no worker": ([begun_job(), OTHER_NAME], OTHER_NAME, "is not a worker"),
    "a name after another job": ([begun_job(), OTHER_JOBS_LABEL], OTHER_JOBS_LABEL, "is not a worker"),
    "an attempt that has not begun": (
        [begun_job(), NEXT_ATTEMPT],
        NEXT_ATTEMPT,
        "belongs to attempt 3",
    ),
    "an owner of another API": (
        [begun_job(), changed(pod(), ownerReferences=[{**OWNER, "apiVersion": "example.com/v1"}])],
        pod(),
        "is not a worker",
    ),
    "the pod is gone": ([begun_job()], pod(), "is gone"),
    "a namesake of the pod": ([begun_job(), changed(pod(), uid="another")], pod(), "is gone"),
}


@pytest.mark.parametrize(("objects", "bearer", "why"), STRANGERS.values(), ids=STRANGERS.keys())
async def test_the_token_of_any_other_pod_is_403(objects: list[Object], bearer: Object, why: str) -> None:
    refused = await refusal(reviewing_cluster(objects, {"token": token_of(bearer)}))
    assert refused.status == 403
    assert why in str(refused)


async def test_a_token_of_another_namespace_is_403_without_further_requests() -> None:
    cluster = reviewing_cluster()
    refused = await refusal(cluster, key=JobKey("../../kube-system", "digits"))
    assert refused.status == 403
    assert cluster.requests == ["create TokenReview"]


async def test_a_job_that_is_gone_is_404() -> None:
    refused = await refusal(reviewing_cluster([pod()]))
    assert (refused.status, str(refused)) == (404, "job digits is gone")


@pytest.mark.parametrize(
    "error",
    [
        Unavailable(500, "InternalError", "etcd is slow"),
        Unavailable(0, "TokenNotReviewed", "no route"),
        Forbidden(403, "Forbidden", "may not create tokenreviews"),
        NotFound(404, "NotFound", "no such resource"),
    ],
    ids=["error", "no answer", "no rights", "no such API"],
)
async def test_an_error_of_the_api_server_says_nothing_about_the_worker(error: ApiError) -> None:
    with pytest.raises(TokenNotReviewed, match=str(error)):
        await reviewer(failing(error)).sender("token", KEY, ADDRESS)


async def test_a_silent_api_server_says_nothing_about_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_TO_ANSWER", 0.01)
    with pytest.raises(TokenNotReviewed, match="no answer within"):
        await reviewer(held(asyncio.Event())).sender("token", KEY, ADDRESS)


async def test_after_an_error_the_next_report_is_reviewed_again() -> None:
    cluster = failing(Unavailable(500, "InternalError", "etcd is slow"))
    asked = reviewer(cluster)
    with pytest.raises(TokenNotReviewed):
        await asked.sender("token", KEY, ADDRESS)
    cluster.faults.clear()
    assert await asked.sender("token", KEY, ADDRESS) == LEADER


async def test_an_accepted_token_is_reviewed_every_ten_minutes() -> None:
    cluster, clock = reviewing_cluster(), Clock(1000.0)
    asked = reviewer(cluster, clock)
    for clock.now in (0.0, 30.0, 599.9):
        assert await asked.sender("token", KEY, ADDRESS) == LEADER
    assert cluster.requests == ONE_REVIEW
    clock.now = 600.0
    assert await asked.sender("token", KEY, ADDRESS) == LEADER
    assert cluster.requests == ONE_REVIEW * 2


async def test_a_refused_token_is_reviewed_again_after_five_seconds() -> None:
    cluster, clock = reviewing_cluster(tokens={}), Clock(1000.0)
    asked = reviewer(cluster, clock)
    for clock.now in (0.0, 1.0, 4.9):
        with pytest.raises(ReportRefused):
            await asked.sender("token", KEY, ADDRESS)
    assert cluster.count()["create TokenReview"] == 1
    cluster.reviews["token"] = token_of(pod())
    clock.now = 5.0
    assert await asked.sender("token", KEY, ADDRESS) == LEADER


async def test_simultaneous_reports_share_one_review() -> None:
    cluster = held(is_over := asyncio.Event())
    asked = reviewer(cluster)
    asyncio.get_running_loop().call_soon(is_over.set)
    senders = await asyncio.gather(*(asked.sender("token", KEY, ADDRESS) for _ in range(20)))
    assert senders == [LEADER] * 20
    assert cluster.requests == ONE_REVIEW


async def test_only_a_few_reviews_run_at_once() -> None:
    """The reconciler talks to the same API server; what is asked on the workers' behalf must not pile up before it."""
    cluster = held(is_over := asyncio.Event())
    cluster.reviews = {str(number): token_of(pod()) for number in range(3 * MOST_QUESTIONS)}
    asked = reviewer(cluster)
    waiting = [asyncio.create_task(asked.sender(token, KEY, f"10.0.0.{token}")) for token in cluster.reviews]
    await settle()
    assert cluster.count()["create TokenReview"] == MOST_QUESTIONS
    is_over.set()
    assert await asyncio.gather(*waiting) == [LEADER] * len(waiting)


async def test_a_flood_from_one_address_does_not_delay_another() -> None:
    cluster = held(is_over := asyncio.Event())
    asked = reviewer(cluster)
    flood = [asyncio.create_task(asked.sender(str(number), KEY, "10.0.0.66")) for number in range(1000)]
    await settle()
    assert cluster.count()["create TokenReview"] == MOST_QUESTIONS_PER_ADDRESS
    is_over.set()
    assert await asked.sender("token", KEY, ADDRESS) == LEADER
    assert cluster.count()["create TokenReview"] < 100
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_token_is_trusted_during_its_review_and_while_the_last_review_was_good() -> None:
    cluster = held(is_over := asyncio.Event())
    asked = reviewer(cluster, clock := Clock(1000.0))
    assert not asked.trusts("token")
    first = asyncio.create_task(asked.sender("token", KEY, ADDRESS))
    await asyncio.sleep(0)
    assert asked.trusts("token")
    is_over.set()
    await first
    clock.now += 600
    assert asked.trusts("token")
    del cluster.reviews["token"]
    with pytest.raises(ReportRefused):
        await asked.sender("token", KEY, ADDRESS)
    assert asked.trusts("token"), "for some seconds the answer is known"
    clock.now += 5
    assert not asked.trusts("token")
