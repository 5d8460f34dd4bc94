"""Every request to the API server is counted with its answer, including retries and answers that never came."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.api_server import ApiServer, credentials_for, hangs_up, refuses, says, serve
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


async def read(cluster: Client) -> None:
    await cluster.get(CONFIG_MAPS, "default", "data")


async def test_an_answer_is_counted_by_status_and_method(server: ApiServer, cluster: Client, metrics: Metrics) -> None:
    server.answers = [OK, refuses(409)]
    await read(cluster)
    with pytest.raises(Conflict):
        await cluster.delete(CONFIG_MAPS, "default", "data", "uid")
    assert counted(metrics, "rest_client_requests_total", "code") == {"200": 1, "409": 1}
    assert counted(metrics, "rest_client_requests_total", "method") == {"GET": 1, "DELETE": 1}


async def test_the_duration_of_a_request_is_measured(server: ApiServer, cluster: Client, metrics: Metrics) -> None:
    server.answers = [OK]
    await read(cluster)
    assert value(metrics, "rest_client_request_duration_seconds_count", verb="GET") == 1
    assert value(metrics, "rest_client_request_duration_seconds_sum", verb="GET") > 0


async def test_every_try_counts(server: ApiServer, cluster: Client, metrics: Metrics) -> None:
    server.answers = [refuses(429, **{"Retry-After": "0"}), OK]
    await read(cluster)
    assert counted(metrics, "rest_client_requests_total", "code") == {"429": 1, "200": 1}


async def test_a_cut_off_answer_counts_as_no_answer(server: ApiServer, cluster: Client, metrics: Metrics) -> None:
    server.answers = [hangs_up]
    with pytest.raises(Unavailable):
        await read(cluster)
    assert counted(metrics, "rest_client_requests_total", "code") == {"<error>": 1}
