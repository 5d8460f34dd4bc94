"""What the doctor makes of the runtime's counters: one cause for every event, no blame for the trainer's own work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tpu_trainer.contract.clock import WARM_UP_STEPS
from tpu_trainer.contract.findings import Finding, FindingReporter
from tpu_trainer.doctor.counts import WINDOW_STEPS, StepCounts, minus
from tpu_trainer.gang.backends.base import Counters


class Device:
    """Counters as a run would leave them: `step` does what a step of the trainer does, plus what the task causes.

    They may only be read while no other replica of the process does anything.
    """

    def __init__(self) -> None:
        self.now = Counters()
        self.told: list[Finding] = []
        self.counts = StepCounts(self, FindingReporter(self.told.append), executions=1)
        self._step = 0
        self._quiet = False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        assert not self._quiet
        self._quiet = True
        yield
        self._quiet = False

    def compilations(self) -> int:
        assert self._quiet
        return self.now.compilations

    def counters(self) -> Counters:
        assert self._quiet
        return self.now

    def steps(self, count: int, batch: Any = None, **more: Any) -> list[str]:
        """The checks that found something in these steps."""
        before = len(self.told)
        for _ in range(count):
            self._step += 1
            self.add(**{"executions": 0, **more})
            self.add(executions=1)
            self.counts.after_step(self._step, torch.zeros(8) if batch is None else batch)
        return [finding.check for finding in self.told[before:]]

    def add(self, fallbacks: dict[str, int] | None = None, **more: float) -> None:
        both = {name: self.now.fallbacks.get(name, 0) + count for name, count in (fallbacks or {}).items()}
        self.now = replace(
            self.now,
            fallbacks={**self.now.fallbacks, **both},
            **{name: getattr(self.now, name) + value for name, value in more.items()},
        )


def warm_device() -> Device:
    device = Device()
    assert device.steps(WARM_UP_STEPS, compilations=1, host_reads=3, executions=3) == []
    return device


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ({}, []),
        ({"host_reads": 1, "executions": 1}, ["HostSync"]),
        ({"executions": 1}, ["MidStepExecution"]),
        ({"fallbacks": {"aten::nonzero": 1}, "host_reads": 1, "executions": 1}, ["CpuFallback"]),
        ({"fallbacks": {"aten::nonzero": 1}, "host_reads": 2, "executions": 2}, ["CpuFallback", "HostSync"]),
        ({"fallbacks": {"aten::nonzero": 1, "aten::_unique2": 1}, "host_reads": 2}, ["CpuFallback", "CpuFallback"]),
    ],
)
def test_every_event_beside_the_trainers_own_work_has_one_cause(events: dict[str, Any], found: list[str]) -> None:
    assert warm_device().steps(3 * WINDOW_STEPS, **events) == found


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ({}, []),
        ({"host_reads": 1, "executions": 1}, ["HostSync"]),
        ({"executions": 1}, ["MidStepExecution"]),
        ({"fallbacks": {"aten::nonzero": 1}, "host_reads": 1, "executions": 1}, ["CpuFallback"]),
    ],
)
def test_what_is_left_of_a_window_is_judged_when_it_is_closed(events: dict[str, Any], found: list[str]) -> None:
    device = warm_device()
    assert device.steps(7, **events) == []
    device.counts.close_window(10)
    assert [finding.check for finding in device.told] == found
    device.counts.close_window(10)
    assert len(device.told) == len(found)


def test_a_single_event_in_a_short_window_is_no_rate() -> None:
    device = warm_device()
    device.add(host_reads=1, executions=1)
    device.steps(5)
    device.counts.close_window(8)
    assert device.told == []


def test_a_read_every_tenth_step_is_fine() -> None:
    device = warm_device()
    for _ in range(10):
        assert device.steps(9) == []
        assert device.steps(1, host_reads=1, executions=1) == []


def test_a_recompilation_with_other_shapes_names_step_and_shapes() -> None:
    device = warm_device()
    device.steps(5)
    assert device.steps(1, torch.zeros(9), compilations=1, compile_seconds=2.5) == ["RecompilationAfterWarmUp"]
    (finding,) = device.told
    assert finding.step == WARM_UP_STEPS + 6
    assert finding.message.startswith(f"step {WARM_UP_STEPS + 6} compiled ")
    assert "2.5 s" in finding.message
    assert "first step it was [8] float32" in finding.message


def test_a_recompilation_with_the_same_shapes_points_at_the_program() -> None:
    device = warm_device()
    device.steps(1, compilations=1)
    assert "PT_XLA_DEBUG_LEVEL=1" in device.told[0].message


def test_a_hundred_recompilations_are_reported_three_times() -> None:
    device = warm_device()
    device.steps(100, compilations=1)
    assert [finding.step - WARM_UP_STEPS for finding in device.told] == [1, 10, 100]
    assert "(the 100th time)" in device.told[-1].message
    assert device.counts.compilations == 100


def test_an_evaluations_events_are_not_blamed_on_a_step() -> None:
    device = warm_device()
    for _ in range(WINDOW_STEPS):
        assert device.steps(1) == []
        with device.counts.set_aside():
            device.add(compilations=3, executions=50, host_reads=50, fallbacks={"aten::nonzero": 9})
    assert device.counts.compilations == 0


@pytest.mark.parametrize("events", [{"executions": 1}, {"host_reads": 1, "executions": 1}])
def test_of_each_block_that_is_set_aside_one_event_may_be_counted_late(events: dict[str, int]) -> None:
    device = warm_device()
    for _ in range(2 * WINDOW_STEPS // 5):
        with device.counts.set_aside():
            device.add(executions=50)
        device.add(**events)
        assert device.steps(5) == []


def test_setting_work_aside_keeps_the_steps_events() -> None:
    device = warm_device()
    for step in range(WINDOW_STEPS):
        found = device.steps(1, host_reads=1, executions=1)
        if step % 2:
            with device.counts.set_aside():
                device.add(host_reads=7)
        assert found == ([] if step + 1 < WINDOW_STEPS else ["HostSync"])


def test_the_difference_of_two_counts_includes_operations_that_only_the_later_one_has() -> None:
    later = Counters(3, 2.5, 10, 4, {"aten::nonzero": 3, "aten::_unique2": 1})
    assert minus(later, Counters(1, 0.5, 4, 4, {"aten::nonzero": 2})) == Counters(
        2, 2.0, 6, 0, {"aten::nonzero": 1, "aten::_unique2": 1}
    )
