"""The metrics as Prometheus reads them: a fixed set of series, all documented, served as text."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from tests.cluster.ports import LOOPBACK, free_port
from tests.unit import statuses
from tests.unit.scrape import scrape, value
from tpu_training_operator.api.conditions import ConditionType, Reason
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Restarts, State, Status
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime.metrics import MOST_NAMESPACES, Metrics, PassResult, serve_metrics
from tpu_training_operator.version import version

GUIDE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
STRANGE = ("digits", "x" * 63, '"}\n', "{state}", "żółw", "")


def job_of_a_newer_operator(reason: str) -> tuple[Status, Status]:
    """A step of a job whose status has words that we do not know."""
    later = {
        "startTime": statuses.at(0),
        "state": "Hibernating",
        "completionTime": statuses.at(60),
        "conditions": [statuses.condition(ConditionType.FAILED, True, 60, reason).as_json()],
        "restarts": {"byClass": {"Gremlins": 2, "Hang": 1}},
        "lastFailure": statuses.failure(1, 30).as_json() | {"class": "Gremlins"},
        "goodput": statuses.goodput(60, start=60).as_json() | {"activity": "Dreaming", "ratio": "0"},
    }
    return Status(), Status.read(later)


def everything_happens(metrics: Metrics, name: str) -> None:
    key = JobKey(name, name)
    metrics.key_queued(key)
    metrics.key_taken(key)
    for result in PassResult:
        metrics.pass_ended(result, 1.0)
    metrics.key_retried()
    metrics.key_done(key)
    for code in (0, 200, 299, 409, 418, 999):
        metrics.request_answered("GET", code, 0.1)
        metrics.report_answered(code, is_known=True)
        metrics.report_answered(code, is_known=False)
    for state in (None, *State):
        metrics.job_seen(key, state)
    metrics.status_written(key, *job_of_a_newer_operator(name[:128]))
    for failure_class in FailureClass:
        failed = statuses.status(
            completion_time=statuses.at(9),
            last_failure=statuses.failure(1, 5, failure_class),
            restarts=Restarts(by_class={failure_class: 1}),
            conditions=[statuses.condition(ConditionType.FAILED, True, 9, Reason.RESTART_LIMIT_REACHED)],
        )
        metrics.status_written(key, statuses.status(), failed)


def test_nothing_that_happens_adds_a_series() -> None:
    """The names of jobs are nowhere, words that we do not know are folded: a scrape is as long as the first one."""
    metrics = Metrics(namespaces=0)
    series = scrape(metrics).keys()
    for name in STRANGE:
        everything_happens(metrics, name)
    assert scrape(metrics).keys() == series


def test_a_scrape_stays_small() -> None:
    metrics = Metrics()
    assert len(scrape(metrics)) < 500
    for number in range(2 * MOST_NAMESPACES):
        metrics.job_seen(JobKey(f"team-{number}", "digits"), State.RUNNING)
    assert len(scrape(metrics)) < 500 + 40 * MOST_NAMESPACES


def test_every_metric_is_documented_with_its_labels_and_type_and_no_other() -> None:
    row = re.compile(r"^\| `([a-z_]+)(?:\{([a-z_, ]+)\})?` \| (gauge|counter|histogram) \|", re.MULTILINE)
    documented = {name: (labels, kind) for name, labels, kind in row.findall(GUIDE)}
    exported: dict[str, tuple[str, str]] = {}
    for family in Metrics().registry.collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        # As it is written in queries: a counter with _total.
        name = family.name + "_total" * (family.type == "counter")
        exported[name] = (", ".join(sorted(labels)), family.type)
    assert documented == exported


def test_the_build_info_shows_the_package_version() -> None:
    assert value(Metrics(), "tpujob_build_info", version=version()) == 1


async def test_the_event_loop_lag_is_the_excess_over_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, now = Metrics(), 1000.0

    async def sleeps_too_long(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.25
        if now > 1002:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    monkeypatch.setattr(asyncio, "sleep", sleeps_too_long)
    with pytest.raises(asyncio.CancelledError):
        await metrics.watch_event_loop()
    assert value(metrics, "tpujob_event_loop_lag_seconds_sum") == 0.25


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("", "text/plain"), ("application/openmetrics-text;version=1.0.0;q=0.5", "application/openmetrics-text")],
)
async def test_prometheus_gets_the_format_it_asks_for(accept: str, content_type: str) -> None:
    metrics, port = Metrics(), free_port()
    async with (
        serve_metrics(port, metrics),
        aiohttp.ClientSession() as session,
        session.get(f"http://{LOOPBACK}:{port}/metrics", headers={"Accept": accept}) as answer,
    ):
        text = await answer.text()
    assert (answer.status, answer.content_type) == (200, content_type)
    assert 'tpujob_build_info{version="' in text


async def test_the_port_is_closed_after_the_block() -> None:
    port = free_port()
    async with serve_metrics(port, Metrics()):
        pass
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"http://{LOOPBACK}:{port}/metrics")


async def test_a_taken_port_is_named_in_the_error() -> None:
    port = free_port()
    async with serve_metrics(port, Metrics()):
        with pytest.raises(OSError, match=str(port)):
            async with serve_metrics(port, Metrics()):
                pytest.fail("two servers on one port")
