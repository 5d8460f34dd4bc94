"""The phases of a worker's start."""

from __future__ import annotations

import pytest

from tpu_contract.protocol import StartPhase
from tpu_trainer.contract.clock import StartTimes


class Now:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def given_a_start(*phases: tuple[StartPhase, float], before: float = 4.0) -> StartTimes:
    """Each phase lasts that long."""
    now = Now()
    times = StartTimes(now, before)
    for phase, seconds in phases:
        if phase is not StartPhase.IMPORTS:
            times.enter(phase)
        now.seconds += seconds
    return times


ALL = (
    (StartPhase.IMPORTS, 1.0),
    (StartPhase.MEETING, 2.0),
    (StartPhase.TASK, 3.0),
    (StartPhase.CHECKPOINT, 0.0),
    (StartPhase.FIRST_STEP, 10.0),
)


def test_the_phases_add_up_to_the_age_of_the_process() -> None:
    times = given_a_start(*ALL)
    times.first_step_made(compiling=7.5)
    assert times.seconds() == {
        "imports": 5.0,
        "meeting": 2.0,
        "task": 3.0,
        "checkpoint": 0.0,
        "compiled": 7.5,
        "firstStep": 2.5,
    }
    assert times.over
    assert str(times) == (
        "first step made after 20.0 s: imports 5.0, meeting 2.0, task 3.0, checkpoint 0.0, compiled 7.5, firstStep 2.5"
    )


def test_a_start_under_way_tells_the_present_phase_and_compiled_nothing() -> None:
    times = given_a_start(*ALL[:2])
    assert times.seconds() == {"imports": 5.0, "meeting": 2.0}
    assert not times.over


@pytest.mark.parametrize(("compiling", "compiled"), [(0.0, 0.0), (10.0, 10.0), (400.0, 10.0)])
def test_programs_compiled_earlier_belong_to_the_phase_in_which_they_were(compiling: float, compiled: float) -> None:
    times = given_a_start(*ALL)
    times.first_step_made(compiling)
    assert times.seconds()["compiled"] == compiled
    assert times.seconds()["firstStep"] == 10.0 - compiled


def test_a_phase_entered_again_goes_on() -> None:
    times = given_a_start((StartPhase.MEETING, 2.0), (StartPhase.TASK, 1.0), (StartPhase.MEETING, 3.0))
    assert times.seconds() == {"imports": 4.0, "meeting": 5.0, "task": 1.0}
