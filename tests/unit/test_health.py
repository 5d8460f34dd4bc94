"""When the liveness probe asks for a restart: when nothing moves any more, and not before."""

import time
from dataclasses import dataclass

import pytest

from tpu_training_operator.runtime.health import Health, Unhealthy


@dataclass
class Controller:
    is_running: bool = True
    standstill: float = 0.0

    def longest_standstill_seconds(self) -> float:
        return self.standstill


@dataclass
class Cluster:
    last_answer: float


def health(monkeypatch: pytest.MonkeyPatch, controller: Controller, silence: float) -> Health:
    monkeypatch.setattr(time, "monotonic", lambda: 10_000.0)
    return Health(controller, Cluster(10_000.0 - silence))


def test_a_healthy_process_reports_two_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = health(monkeypatch, Controller(standstill=2.04), 12.34).check()
    assert ages == {"longestStandstillSeconds": 2.0, "secondsSinceLastAnswer": 12.3}


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
        (Controller(), 901.0, "the API server has not answered for 901 s"),
    ],
)
def test_a_stuck_process_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch, controller: Controller, silence: float, why: str
) -> None:
    with pytest.raises(Unhealthy, match=why):
        health(monkeypatch, controller, silence).check()
