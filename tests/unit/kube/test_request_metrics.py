"""Every request to the API server is counted with its answer, including retries and answers that never came."""

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tests.fakes.api_server import Answer, ApiServer, credentials_for, hangs_up, refuses, says, serve
from tests.unit.scrape import counted, value
from tpu_training_operator.kube.client import Client, ClientOptions, connect
from tpu_training_operator.kube.cluster import CONFIG_MAPS
from tpu_training_operator.kube.errors import Conflict, Unavailable
from tpu_training_operator.runtime.metrics import Metrics

OK = says(200, {"kind": "ConfigMap", "metadata": {"name": "data"}})


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with serve(ApiServer()) as started:
        yield started


@pytest.fixture
async def cluster(server: ApiServer, metrics: Metrics) -> AsyncIterator[Client]:
    async with connect(credentials_for(server.url), ClientOptions(on_answer=metrics.request_answered)) as connected:
        yield connected


@pytest.mark.parametrize(
    ("answers", "codes"),
    [
        ([OK], {"200": 1}),
        ([refuses(409)], {"409": 1}),
        ([refuses(429, **{"Retry-After": "0"}), OK], {"429": 1, "200": 1}),
        ([hangs_up], {"<error>": 1}),
    ],
    ids=["an answer", "a refusal", "every try", "an answer that is cut off"],
)
async def test_a_request_is_counted_by_status_and_method_and_measured(
    server: ApiServer, cluster: Client, metrics: Metrics, answers: list[Answer], codes: dict[str, int]
) -> None:
    server.answers = list(answers)
    with suppress(Conflict, Unavailable):
        await cluster.delete(CONFIG_MAPS, "default", "data", "uid")
    assert counted(metrics, "rest_client_requests_total", "code") == codes
    assert counted(metrics, "rest_client_requests_total", "method").keys() == {"DELETE"}
    assert value(metrics, "rest_client_request_duration_seconds_count", verb="DELETE") == sum(codes.values())
    assert value(metrics, "rest_client_request_duration_seconds_sum", verb="DELETE") > 0
