"""When the liveness probe asks for a restart: when nothing moves any more, and not before."""

import time
from dataclasses import dataclass

import aiohttp
import pytest

from tests.unit.tls_probe import LOOPBACK
from tpu_training_operator.runtime.health import Liveness, Unhealthy, serve_health


@dataclass
class Controller:
    is_running: bool = True
    standstill: float = 0.0

    def longest_standstill_seconds(self) -> float:
        return self.standstill


@dataclass
class Client:
    last_answer: float


@dataclass
class Watching:
    is_running: bool = True
    standstill: float = 0.0
    silence: float = 0.0

    def longest_standstill_seconds(self) -> float:
        return self.standstill

    def longest_silence_seconds(self) -> float:
        return self.silence


def health(
    monkeypatch: pytest.MonkeyPatch, controller: Controller, silence: float, watching: Watching | None = None
) -> Liveness:
    monkeypatch.setattr(time, "monotonic", lambda: 10_000.0)
    clients = Client(10_000.0 - silence), Client(0.0)
    return Liveness(controller, clients, watching or Watching())


def test_a_healthy_process_reports_its_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = health(monkeypatch, Controller(standstill=2.04), 12.34, Watching(silence=50.04)).check()
    assert ages == {"longestStandstillSeconds": 2.0, "secondsSinceLastAnswer": 12.3, "secondsSinceLastNews": 50.0}


def test_an_api_server_that_refuses_to_be_watched_is_no_reason_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert health(monkeypatch, Controller(), 0.0, Watching(silence=10_000.0)).check()


@pytest.mark.parametrize(
    ("watching", "why"),
    [
        (Watching(is_running=False), "watching has stopped"),
        (Watching(standstill=301.0), "watch has been stuck for 301 s"),
    ],
)
def test_a_stuck_watch_is_unhealthy(monkeypatch: pytest.MonkeyPatch, watching: Watching, why: str) -> None:
    with pytest.raises(Unhealthy, match=why):
        health(monkeypatch, Controller(), 0.0, watching).check()


@pytest.mark.parametrize(("standstill", "silence"), [(300.0, 0.0), (0.0, 900.0)])
def test_slow_requests_and_a_silent_api_server_are_tolerated_for_a_while(
    monkeypatch: pytest.MonkeyPatch, standstill: float, silence: float
) -> None:
    assert health(monkeypatch, Controller(standstill=standstill), silence).check()


@pytest.mark.parametrize(
    ("controller", "silence", "why"),
    [
        (Controller(is_running=False), 0.0, "the controller has stopped"),
        (Controller(standstill=301.0), 0.0, "a pass has been stuck for 301 s"),
        (Controller(), 901.0, "not answered for 901 s"),
    ],
)
def test_a_stuck_process_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch, controller: Controller, silence: float, why: str
) -> None:
    with pytest.raises(Unhealthy, match=why):
        health(monkeypatch, controller, silence).check()


async def asked(port: int) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{LOOPBACK}:{port}/healthz") as answer:
        return answer.status, await answer.json()


async def test_the_kubelet_is_told_the_ages_or_why_to_restart(caplog: pytest.LogCaptureFixture) -> None:
    well = True

    def check() -> dict[str, float]:
        if not well:
            raise Unhealthy("a pass has been stuck for 301 s")
        return {"longestStandstillSeconds": 1.0}

    async with serve_health(0, check) as port:
        assert await asked(port) == (200, {"longestStandstillSeconds": 1.0})
        well = False
        for _ in range(2):
            status, answer = await asked(port)
            assert (status, "301 s" in str(answer)) == (503, True)
    assert len(caplog.records) == 1, "strangers may ask, too"
