"""How the client handles an API server's answers, above all bad ones, against a scripted server on loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.client import Configuration

from tests.cluster.ports import free_port
from tests.contract.jobs import job_body
from tests.fakes.api_server import (
    Answer,
    ApiServer,
    Call,
    answers_in_plain_text,
    credentials_for,
    hangs_up,
    refuses,
    says,
    serve,
)
from tests.fakes.objects import config_map
from tpu_training_operator.kube import client
from tpu_training_operator.kube.client import Client, ClientOptions, Selection, connect
from tpu_training_operator.kube.cluster import CONFIG_MAPS, EVENTS, JOBS, PODS, Object
from tpu_training_operator.kube.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    Expired,
    Forbidden,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from tpu_training_operator.runtime.controller import beat, pulse

Ask = Callable[[Client], Awaitable[Any]]
OK = says(200, {"kind": "ConfigMap", "metadata": {"name": "data"}})


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with serve(ApiServer()) as started:
        yield started


@pytest.fixture
async def cluster(server: ApiServer) -> AsyncIterator[Client]:
    async with connect(credentials_for(server.url)) as connected:
        yield connected


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client has slept; the sleeps take no time."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        if seconds > 0:
            slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", record)
    return slept


async def get(cluster: Client) -> Object:
    return await cluster.get(CONFIG_MAPS, "default", "data")


async def create(cluster: Client) -> Object:
    return await cluster.create(config_map("default", "data"))


async def update_status(cluster: Client) -> Object:
    return await cluster.update_status(job_body())


async def delete(cluster: Client) -> None:
    await cluster.delete(PODS, "default", "digits-1-0-0", "4d5f")


async def failure_of(request: Awaitable[Any]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await request
    return raised.value


# Requests


async def test_each_method_sends_a_request_that_the_api_server_understands(server: ApiServer, cluster: Client) -> None:
    server.answers = [OK]
    body = config_map("default", "data")
    await get(cluster)
    await cluster.create(body)
    await cluster.update(body)
    await update_status(cluster)
    await delete(cluster)
    job_path = "/apis/tpu-operator.dev/v1alpha1/namespaces/default/tputrainingjobs/digits"
    manager = {"fieldManager": "tpu-training-operator"}
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "4d5f"}}
    assert server.calls == [
        Call("GET", "/api/v1/namespaces/default/configmaps/data", {}, None, None),
        Call("POST", "/api/v1/namespaces/default/configmaps", manager, body, None),
        Call("PUT", "/api/v1/namespaces/default/configmaps/data", manager, body, None),
        Call("PUT", f"{job_path}/status", manager, job_body(), None),
        Call("DELETE", "/api/v1/namespaces/default/pods/digits-1-0-0", {}, options, None),
    ]


@pytest.mark.parametrize(
    ("answer", "is_gone"),
    [
        ({"kind": "Status", "status": "Success"}, True),
        # Of a pod that two have deleted at the same moment.
        ({"kind": "Pod", "metadata": {"name": "digits-1-0-0", "deletionTimestamp": "2026-01-15T12:00:00Z"}}, True),
        ({"kind": "Pod", "metadata": {"name": "digits-1-0-0", "resourceVersion": "7"}}, False),
    ],
)
async def test_an_object_without_a_version_is_gone(
    server: ApiServer, cluster: Client, answer: Object, is_gone: bool
) -> None:
    server.answers = [says(200, answer)]
    assert (await cluster.delete(PODS, "default", "digits-1-0-0", "uid") is None) is is_gone


async def test_a_long_list_is_fetched_page_by_page(server: ApiServer, cluster: Client) -> None:
    server.answers = [
        says(200, {"kind": "PodList", "metadata": {"continue": "second"}, "items": [{"n": 1}, {"n": 2}]}),
        says(200, {"kind": "PodList", "metadata": {"continue": "third"}, "items": []}),
        says(200, {"kind": "PodList", "metadata": {}, "items": [{"n": 3}]}),
    ]
    assert await cluster.list(PODS, None, {"job": "digits", "attempt": "1"}) == [{"n": 1}, {"n": 2}, {"n": 3}]
    page = {"limit": "100", "labelSelector": "job=digits,attempt=1"}
    assert [(call.path, call.query) for call in server.calls] == [
        ("/api/v1/pods", page),
        ("/api/v1/pods", page | {"continue": "second"}),
        ("/api/v1/pods", page | {"continue": "third"}),
    ]


async def test_a_list_keeps_only_the_wanted_part_of_an_object(server: ApiServer) -> None:
    server.answers = [says(200, {"kind": "PodList", "metadata": {}, "items": [{"n": 1, "managedFields": "x" * 1000}]})]
    async with connect(credentials_for(server.url), ClientOptions(keep={PODS: lambda pod: {"n": pod["n"]}})) as cluster:
        assert await cluster.list(PODS, None) == [{"n": 1}]
        assert await cluster.list(JOBS, None) == [{"n": 1, "managedFields": "x" * 1000}]


async def test_an_object_that_is_nested_too_deeply_does_not_hide_its_page(server: ApiServer, cluster: Client) -> None:
    deep = '{"n": ' + "[" * 10_000 + "]" * 10_000 + "}"
    text = f'{{"kind": "PodList", "metadata": {{}}, "items": [{deep}, {{"n": 2}}]}}'
    server.answers = [answers_in_plain_text(200, text, "application/json")]
    found = await cluster.list(PODS, "default")
    assert (len(found), found[1]) == (2, {"n": 2})


async def test_a_list_can_leave_objects_out(server: ApiServer) -> None:
    server.answers = [says(200, {"kind": "PodList", "metadata": {}, "items": [{"n": 1}, {"n": 2}]})]
    keep = {PODS: lambda pod: pod if pod["n"] == 2 else None}
    async with connect(credentials_for(server.url), ClientOptions(keep=keep)) as cluster:
        assert await cluster.list(PODS, None) == [{"n": 2}]


def many(plural: str, count: int, size: int = 0) -> Answer:
    """So many objects, each of that size, in pages as they are asked for."""

    async def answer(request: web.Request) -> web.StreamResponse:
        start, limit = int(request.query.get("continue") or 0), int(request.query["limit"])
        end = min(start + limit, count)
        items = [{"n": number, "text": "x" * size} for number in range(start, end)]
        metadata = {"continue": str(end)} if end < count else {}
        return web.json_response({"kind": plural, "metadata": metadata, "items": items})

    return answer


async def test_a_page_that_is_too_large_is_requested_in_smaller_ones(
    server: ApiServer, cluster: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LONGEST_BODY", 30_000)
    server.answers = [many("PodList", 60, size=1000)]
    assert [pod["n"] for pod in await cluster.list(PODS, None)] == list(range(60))
    assert [call.query["limit"] for call in server.calls] == ["100", "50", "25", "25", "25"]


async def test_an_endless_answer_is_not_read_to_the_end(
    server: ApiServer, cluster: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(b" " * 10_000)
        return response

    monkeypatch.setattr(client, "_LONGEST_BODY", 30_000)
    server.answers = [endless]
    for request in (get(cluster), cluster.list(JOBS, None)):
        failure = await failure_of(request)
        assert (type(failure).__base__, failure.reason) == (Unavailable, "TooLarge")


async def test_a_list_of_events_is_bounded(server: ApiServer, cluster: Client) -> None:
    server.answers = [many("EventList", 10_000)]
    assert len(await cluster.list(EVENTS, "default", None, {"regarding.uid": "4d5f"})) == 100
    assert len(server.calls) == 2


async def test_only_a_few_pages_are_read_at_once(server: ApiServer, cluster: Client) -> None:
    under_way, most = 0, 0
    both_here = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 2:
            both_here.set()
        await both_here.wait()
        # Any further request that is let through arrives now.
        await asyncio.sleep(0.05)
        under_way -= 1
        return web.json_response({"kind": "PodList", "metadata": {}, "items": []})

    server.answers = [slow]
    await asyncio.gather(*(cluster.list(PODS, f"team-{number}") for number in range(6)))
    assert most == 2


async def test_a_page_that_has_expired_fails_the_list(server: ApiServer, cluster: Client) -> None:
    server.answers = [
        says(200, {"kind": "PodList", "metadata": {"continue": "second"}, "items": [{}]}),
        refuses(410, "Expired", "too old"),
    ]
    failure = await failure_of(cluster.list(PODS, "default"))
    assert (type(failure), failure.status) == (Expired, 410)


# Refusals

REFUSALS = [
    (get, 400, "BadRequest", InvalidRequest),
    (get, 401, "Unauthorized", Unavailable),
    (get, 403, "Forbidden", Forbidden),
    (get, 404, "NotFound", NotFound),
    (create, 404, "NotFound", NotFound),
    (create, 413, "RequestEntityTooLarge", InvalidRequest),
    (create, 409, "AlreadyExists", AlreadyExists),
    (create, 409, "Conflict", Conflict),
    (update_status, 409, "Conflict", Conflict),
    (delete, 409, "Conflict", Conflict),
    (create, 422, "Invalid", InvalidRequest),
    (get, 500, "InternalError", Unavailable),
    (get, 503, "ServiceUnavailable", Unavailable),
    (get, 504, "Timeout", Unavailable),
]


@pytest.mark.parametrize(
    ("request_", "status", "reason", "kind"),
    REFUSALS,
    ids=[f"{request.__name__}-{status}-{reason}" for request, status, reason, _ in REFUSALS],
)
async def test_a_refusal_is_raised_at_once_with_the_servers_words(
    server: ApiServer,
    cluster: Client,
    request_: Callable[[Client], Awaitable[Any]],
    status: int,
    reason: str,
    kind: type[ApiError],
) -> None:
    server.answers = [refuses(status, reason, "because of this")]
    failure = await failure_of(request_(cluster))
    assert type(failure) is kind
    assert (failure.status, failure.reason, str(failure)) == (status, reason, "because of this")
    assert len(server.calls) == 1


async def test_a_refusal_without_a_message_still_gets_one(server: ApiServer, cluster: Client) -> None:
    server.answers = [says(500, {"kind": "Status"})]
    assert str(await failure_of(get(cluster))) == "HTTP 500"


async def test_an_answer_without_a_kind_is_not_an_object(server: ApiServer, cluster: Client) -> None:
    server.answers = [says(200, {"metadata": {"name": "data"}})]
    failure = await failure_of(get(cluster))
    assert (type(failure), failure.reason) == (Unavailable, "NoObject")


async def test_a_proxys_page_is_quoted(server: ApiServer, cluster: Client) -> None:
    server.answers = [answers_in_plain_text(502, "<h1>Bad Gateway</h1>")]
    failure = await failure_of(get(cluster))
    assert (type(failure), str(failure)) == (Unavailable, "<h1>Bad Gateway</h1>")


# No answer


async def test_a_server_that_is_down_is_unavailable() -> None:
    async with connect(credentials_for(f"http://127.0.0.1:{free_port()}")) as cluster:
        failure = await failure_of(get(cluster))
    assert (type(failure), failure.status) == (Unavailable, 0)
    assert str(failure).startswith("GET /api/v1/namespaces/default/configmaps/data: ")


async def test_a_server_that_hangs_up_is_unavailable(server: ApiServer, cluster: Client) -> None:
    server.answers = [hangs_up]
    failure = await failure_of(create(cluster))
    assert (type(failure), failure.status) == (Unavailable, 0)


async def test_a_server_that_says_nothing_is_unavailable(
    server: ApiServer, cluster: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = asyncio.Event()

    async def keeps_silent(_: web.Request) -> web.StreamResponse:
        await released.wait()
        return web.Response()

    server.answers = [keeps_silent]
    monkeypatch.setattr(client, "_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    failure = await failure_of(get(cluster))
    released.set()
    assert (type(failure), failure.status) == (Unavailable, 0)


@pytest.mark.parametrize(
    ("text", "content_type"),
    [("<h1>Log in</h1>", "text/html"), ('{"kind": "Conf', "application/json"), ("[]", "application/json")],
    ids=["a proxy's page", "cut off", "no object"],
)
async def test_a_good_status_without_an_object_is_unavailable(
    server: ApiServer, cluster: Client, text: str, content_type: str
) -> None:
    server.answers = [answers_in_plain_text(200, text, content_type)]
    failure = await failure_of(cluster.list(JOBS, None))
    assert type(failure) is Unavailable
    assert text in str(failure)


# Overload


async def watch(cluster: Client) -> Object:
    return await anext(cluster.watch(Selection(CONFIG_MAPS, "default"), "1"))


async def one_event(_: web.Request) -> web.StreamResponse:
    return web.Response(text='{"type": "ADDED", "object": {"kind": "ConfigMap"}}\n')


# The same rule applies to every kind of request.
ASKS = [(get, OK), (create, OK), (watch, one_event)]
each_ask = pytest.mark.parametrize(("ask", "answer"), ASKS, ids=["get", "create", "watch"])


@each_ask
@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"Retry-After": "2"}, 2.0),
        (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        (429, {}, 1.0),
        (503, {"Retry-After": "1"}, 1.0),
    ],
    ids=["as asked", "a date", "not said", "unavailable"],
)
async def test_the_client_waits_out_a_short_pause(
    server: ApiServer,
    cluster: Client,
    waits: list[float],
    ask: Ask,
    answer: Answer,
    status: int,
    headers: dict[str, str],
    seconds: float,
) -> None:
    server.answers = [refuses(status, "TooManyRequests", **headers), answer]
    await ask(cluster)
    assert waits == [seconds]
    assert len(server.calls) == 2


@each_ask
@pytest.mark.parametrize(("asked", "told"), [("3", 3.0), ("30", 30.0), ("3600", 30.0)])
async def test_a_long_pause_is_left_to_the_caller(
    server: ApiServer, cluster: Client, waits: list[float], ask: Ask, answer: Answer, asked: str, told: float
) -> None:
    server.answers = [refuses(429, "TooManyRequests", "try later", **{"Retry-After": asked}), answer]
    failure = await failure_of(ask(cluster))
    assert (type(failure), failure.status, str(failure)) == (Unavailable, 429, "try later")
    assert failure.retry_after == told
    assert waits == []


@each_ask
async def test_a_server_that_stays_overloaded_is_unavailable(
    server: ApiServer, cluster: Client, ask: Ask, answer: Answer
) -> None:
    server.answers = [refuses(429, "TooManyRequests", "try later", **{"Retry-After": "0"})]
    failure = await failure_of(ask(cluster))
    assert (type(failure), failure.status, str(failure)) == (Unavailable, 429, "try later")
    assert len(server.calls) == 5


@pytest.mark.parametrize(("patience", "pauses"), [(2.0, 2), (30.0, 4)], ids=["the operator's", "a command's"])
async def test_the_pauses_of_a_request_have_a_bounded_sum(
    server: ApiServer, waits: list[float], patience: float, pauses: int
) -> None:
    server.answers = [refuses(429, "TooManyRequests", "try later", **{"Retry-After": "1"})]
    async with connect(credentials_for(server.url), ClientOptions(patience=patience)) as cluster:
        failure = await failure_of(create(cluster))
    assert waits == [1.0] * pauses
    assert failure.retry_after == 1.0


# Credentials


class RotatingTokens:
    """Gives token 1, token 2 and so on, a new one on every read."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self, configuration: Configuration) -> None:
        self.readings += 1
        configuration.api_key["BearerToken"] = f"Bearer {self.readings}"


@pytest.fixture
async def with_token(server: ApiServer) -> AsyncIterator[Client]:
    credentials = credentials_for(server.url)
    credentials.configuration.api_key["BearerToken"] = "Bearer 0"
    credentials.configuration.refresh_api_key_hook = RotatingTokens()
    async with connect(credentials) as connected:
        yield connected


async def test_a_token_is_kept_between_requests(server: ApiServer, with_token: Client) -> None:
    server.answers = [OK]
    await get(with_token)
    await get(with_token)
    assert [call.authorization for call in server.calls] == ["Bearer 1", "Bearer 1"]


async def test_a_refused_token_is_read_again(server: ApiServer, with_token: Client) -> None:
    server.answers = [refuses(401, "Unauthorized"), OK]
    failure = await failure_of(get(with_token))
    await get(with_token)
    assert type(failure) is Unavailable
    assert [call.authorization for call in server.calls] == ["Bearer 1", "Bearer 2"]


@pytest.mark.parametrize("answer", [says, refuses], ids=["a good answer", "a refusal"])
async def test_the_clock_follows_the_api_server(server: ApiServer, cluster: Client, answer: Callable[..., Any]) -> None:
    noon = datetime(2040, 1, 15, 12, tzinfo=UTC)
    body = () if answer is refuses else ({"kind": "ConfigMap", "metadata": {"name": "data"}},)
    server.answers = [answer(200 if body else 404, *body, Date=format_datetime(noon, usegmt=True))]
    with suppress(NotFound):
        await cluster.get(CONFIG_MAPS, "default", "data")
    assert abs(cluster.clock.now() - noon) < timedelta(minutes=1)


async def test_any_answer_except_a_refused_token_counts_as_a_sign_of_life(server: ApiServer, cluster: Client) -> None:
    server.answers = [refuses(401, "Unauthorized"), refuses(500), OK]
    moments = [cluster.last_answer]
    for _ in range(3):
        with suppress(ApiError):
            await get(cluster)
        moments.append(cluster.last_answer)
    assert moments[0] == moments[1] < moments[2] < moments[3]


@pytest.mark.parametrize("answer", [OK, refuses(500), hangs_up])
async def test_an_answer_beats_for_the_pass_that_asked(server: ApiServer, answer: Answer) -> None:
    server.answers = [answer]
    with pulse() as stuck:
        pass
    options = ClientOptions(on_answer=lambda *_: beat())
    async with connect(credentials_for(server.url), options) as cluster:
        with pulse() as working:
            begun = working.at
            with suppress(ApiError):
                await asyncio.create_task(get(cluster))
    assert begun < working.at
    assert stuck.at <= begun
