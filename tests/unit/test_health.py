"""When the liveness probe asks for a restart: when nothing moves any more, and not before."""

import time
from dataclasses import dataclass

import pytest

from tpu_training_operator.runtime.health import Health, Unhealthy


@dataclass
class Controller:
    is_running: bool = True
    pass_seconds: float = 0.0

    def longest_pass_seconds(self) -> float:
        return self.pass_seconds


@dataclass
class Cluster:
    last_success: float


def health(monkeypatch: pytest.MonkeyPatch, controller: Controller, silence: float) -> Health:
    monkeypatch.setattr(time, "monotonic", lambda: 10_000.0)
    return Health(controller, Cluster(10_000.0 - silence))


def test_a_working_process_tells_its_two_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = health(monkeypatch, Controller(pass_seconds=2.04), 12.34).check()
    assert ages == {"longestPassSeconds": 2.0, "secondsSinceLastAnswer": 12.3}


@pytest.mark.parametrize(("pass_seconds", "silence"), [(300.0, 0.0), (0.0, 900.0)])
def test_a_slow_pass_and_a_quiet_api_server_are_borne_for_a_while(
    monkeypatch: pytest.MonkeyPatch, pass_seconds: float, silence: float
) -> None:
    assert health(monkeypatch, Controller(pass_seconds=pass_seconds), silence).check()


@pytest.mark.parametrize(
    ("controller", "silence", "why"),
    [
        (Controller(is_running=False), 0.0, "the controller has stopped"),
        (Controller(pass_seconds=301.0), 0.0, "one pass has been running for 301 s"),
        (Controller(), 901.0, "no successful API request for 901 s"),
    ],
)
def test_a_process_in_which_nothing_moves_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch, controller: Controller, silence: float, why: str
) -> None:
    with pytest.raises(Unhealthy, match=why):
        health(monkeypatch, controller, silence).check()
