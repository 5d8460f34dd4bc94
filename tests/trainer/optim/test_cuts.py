"""What is read from a device that puts its work off is read by all replicas, at the same place and in the same order.

On TorchTPU a replica that reads alone runs the collectives before it alone, and waits forever. A stand-in for its
device records what every replica reads, and where it waits and meets the others (`standin_tpu`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.trainer import plain
from tests.trainer.cuts_on_standin import SCENARIOS, STOPS_AFTER
from tests.trainer.gang_processes import Launcher
from tests.trainer.loop.test_trajectories import CLOSE

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cuts")
    launcher = Launcher(folder)
    try:
        launcher.run_alone("tests.trainer.cuts_on_standin", TEST_FOLDER=str(folder))
        yield json.loads((folder / "found.json").read_text())
    finally:
        launcher.reap()


@pytest.fixture
def found(recorded: dict[str, Any]) -> Found:
    runs: Found = recorded["runs"]
    return runs


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ("alone", "unlike")])
def test_all_replicas_make_the_same_cuts_in_the_same_order(scenario: str, found: Found) -> None:
    for run in found[scenario]:
        assert set(run["codes"]) <= {"Succeeded", "Preempted"}, run["messages"]
        first, second = run["events"]
        assert first == second
        assert {event.split()[0] for event in first} >= {"all_reduce", "all_gather", "read"}


def test_a_value_that_one_replica_reads_alone_is_noticed(found: Found) -> None:
    (run,) = found["alone"]
    assert run["codes"] == ["Succeeded"] * 2, run["messages"]
    first, second = run["events"]
    assert len(first) == len(second) + run_steps(run)


def test_nothing_is_read_by_the_thread_that_writes_checkpoints(recorded: dict[str, Any]) -> None:
    assert recorded["stray"] == []


def test_every_step_is_cut_once_at_its_end_before_anything_is_read(found: Found) -> None:
    (run,) = found["plain"]
    events = run["events"][0]
    (bucket, steps), *_ = Counter(event for event in events if event.startswith("all_reduce")).most_common()
    assert steps == run_steps(run)
    assert [events[place + 1] for place, event in enumerate(events) if event == bucket] == ["cut"] * steps


@pytest.mark.parametrize("mode", ["plain", "eager"])
def test_only_work_that_is_put_off_is_waited_for(mode: str, found: Found) -> None:
    (run,) = found[mode]
    fused = mode == "plain"
    assert run["mode"] == ("DEFER_AND_FUSE" if fused else "DEFER_NEVER")
    assert ("cut" in run["events"][0]) is fused


def test_the_stand_in_trains_as_plain_pytorch_does(found: Found) -> None:
    (run,) = found["plain"]
    assert run["losses"] == pytest.approx(plain.small("sgd"), abs=CLOSE)


def test_a_run_that_one_replica_is_told_to_stop_continues_as_if_it_had_not_been(found: Found) -> None:
    stopped, resumed = found["stopped"]
    assert stopped["codes"] == ["Preempted"] * 2
    assert STOPS_AFTER <= len(stopped["losses"]) < run_steps(found["everything"][0])
    assert stopped["losses"] + resumed["losses"] == pytest.approx(found["everything"][0]["losses"], abs=CLOSE)


def test_replicas_whose_gradients_do_not_fit_together_end_before_they_meet(found: Found) -> None:
    (run,) = found["unlike"]
    assert run["codes"] == ["Diverged"] * 2, run["messages"]
    assert all("in step 1 replica 1 would" in text for text in run["messages"])


def run_steps(run: dict[str, Any]) -> int:
    return len(run["losses"])
