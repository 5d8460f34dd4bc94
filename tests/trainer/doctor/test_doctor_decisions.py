"""What the doctor concludes from numbers: which are worth a warning, and how often."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.trainer.gang_processes import ROOT
from tpu_contract.protocol import Check, Phase
from tpu_trainer.contract.clock import StepPace
from tpu_trainer.contract.findings import Finding, FindingReporter
from tpu_trainer.doctor import hang
from tpu_trainer.doctor.agreement import find_odd_ranks, replicas
from tpu_trainer.doctor.counts import difference, shapes_of
from tpu_trainer.doctor.stragglers import (
    SHORTEST_SECONDS,
    SlowHost,
    SlowHostDetector,
    Vitals,
    find_slow_host,
    input_share,
)
from tpu_trainer.gang.gather import EXACT


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (torch.zeros(8, 3), {"batch": "[8, 3] float32"}),
        ([torch.zeros(8), "label"], {"batch[0]": "[8] float32"}),
        ({"tokens": torch.zeros(2, 5, dtype=torch.int64)}, {"batch['tokens']": "[2, 5] int64"}),
        ({"a": (torch.zeros(1),)}, {"batch['a'][0]": "[1] float32"}),
        (Pair(torch.zeros(1), torch.zeros(())), {"batch[0]": "[1] float32", "batch[1]": "[] float32"}),
        (7, {}),
    ],
)
def test_shapes_name_every_tensor_of_a_batch_by_its_place(batch: Any, shapes: dict[str, str]) -> None:
    assert shapes_of(batch) == shapes


def test_a_difference_of_shapes_names_the_place_and_both_shapes(snapshot: SnapshotAssertion) -> None:
    first, now = shapes_of([torch.zeros(8, 64), torch.zeros(8)]), shapes_of([torch.zeros(8, 57), torch.zeros(8)])
    assert "57" in difference(first, now)
    assert "64" in difference(first, now)
    assert difference(first, now) == snapshot
    assert difference(first, first) is None
    assert difference({"batch[0]": "[8] int64"}, {}) == snapshot


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ("aaaa", None),
        ("a", None),
        ("aaba", ([2], [0, 1, 3])),
        ("baaa", ([0], [1, 2, 3])),
        ("ab", ([1], [0])),
        ("abcc", ([0, 1], [2, 3])),
        ("bbaa", ([2, 3], [0, 1])),
    ],
)
def test_the_odd_ones_are_outside_the_largest_group(values: str, odd: tuple[list[int], list[int]] | None) -> None:
    assert find_odd_ranks(values) == odd


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_the_odd_ones_and_the_others_are_all_the_replicas(values: list[str]) -> None:
    if (parties := find_odd_ranks(values)) is None:
        assert len(set(values)) == 1
    else:
        odd, others = parties
        assert sorted(odd + others) == list(range(len(values)))
        assert len({values[rank] for rank in others}) == 1
        assert not {values[rank] for rank in odd} & {values[others[0]]}


def test_many_replicas_are_named_in_few_words() -> None:
    assert replicas([3]) == "replica 3"
    assert replicas([0, 1, 2, 5, 7, 8]) == "replicas 0-2, 5, 7-8"
    assert replicas(range(256)) == "replicas 0-255"


def test_the_manual_has_a_row_for_every_check() -> None:
    rows = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)`", rows, re.MULTILINE)) == set(Check)


def test_a_cause_is_told_again_only_when_it_is_ten_times_worse() -> None:
    told: list[Finding] = []
    voice = FindingReporter(told.append)
    for step, severity in enumerate([1.0, 2.0, 9.9, 10.0, 50.0, 100.0]):
        voice.report(Check.INPUT_BOUND, step, "slow", severity=severity)
    assert [finding.step for finding in told] == [0, 3, 5]


def test_every_check_and_every_cause_is_told_separately() -> None:
    told: list[Finding] = []
    voice = FindingReporter(told.append)
    one, other = Check.PADDING, Check.CPU_FALLBACK
    for check, cause in [(one, None), (one, 1), (one, 2), (other, 1), (one, 1)]:
        voice.report(check, 0, "text", cause=cause)
    assert len(told) == 4


def hosts(*work: float, waiting: float = 0.0, total: float = 10.0) -> list[Vitals]:
    return [Vitals(host, waiting, seconds, total, 0) for host, seconds in enumerate(work)]


@pytest.mark.parametrize(
    ("vitals", "found"),
    [
        (hosts(4.0, 4.1, 3.9, 4.0), None),
        (hosts(4.0, 4.0, 8.0, 4.0), SlowHost(2, 2.0, 0.4, input_bound=False)),
        (hosts(9.0, 3.0), SlowHost(0, 3.0, 0.6, input_bound=False)),
        (hosts(4.0, 4.0, 5.9, 4.0), None),  # less than half as long again
        (hosts(0.1, 0.1, 0.5, 0.1), None),  # five times as long, and less than 5 % of the step
        (hosts(9.0), None),
        ([*hosts(9.0, 3.0), Vitals(0, 0.0, 9.0, 10.0, 0)], SlowHost(0, 3.0, 0.6, input_bound=False)),
        ([Vitals(0, 0.0, 1.0, 10.0, 0), Vitals(0, 0.0, 9.0, 10.0, 0)], None),  # two processes of one host
        (hosts(4.0, 9.0, waiting=5.0), SlowHost(1, 2.25, 0.5, input_bound=True)),
    ],
)
def test_a_straggler_is_much_slower_than_the_others_and_costs_them_time(
    vitals: list[Vitals], found: SlowHost | None
) -> None:
    assert find_slow_host(vitals) == found


def test_the_gangs_input_share_is_of_the_host_that_waits_longest() -> None:
    assert input_share([Vitals(0, 1.0, 2.0, 10.0, 0), Vitals(3, 4.0, 5.0, 10.0, 0)]) == (3, 0.4)


def test_an_interval_shorter_than_two_seconds_is_not_judged() -> None:
    waiting = SlowHostDetector(FindingReporter(lambda finding: None))
    assert not waiting.judge(1, hosts(0.1, total=SHORTEST_SECONDS - 0.1))
    assert waiting.judge(1, hosts(0.1, total=SHORTEST_SECONDS))


@given(st.integers(0, 2**16), st.floats(0, 1e4, width=32), st.integers(0, 2**20), st.integers(0, EXACT - 1))
def test_vitals_survive_the_float32_row_they_travel_in(
    host: int, seconds: float, compilations: int, digest: int
) -> None:
    vitals = Vitals(host, seconds, seconds, seconds, compilations, digest)
    assert Vitals.of(torch.tensor(vitals.row(), dtype=torch.float32).tolist()) == vitals


def pace_of(durations: Sequence[float]) -> StepPace:
    times = iter([0.0, *(sum(durations[: count + 1]) for count in range(len(durations)))])
    pace = StepPace(lambda: next(times))
    for step in range(1, len(durations) + 1):
        pace.step_done(step)
    return pace


@pytest.mark.parametrize(
    ("phase", "durations", "override", "limit"),
    [
        (Phase.START, [], None, 1800),
        (Phase.INPUT, [1.0], None, 1800),  # the first steps compile
        (Phase.DEVICE, [1.0], None, 1860),
        (Phase.INPUT, [1.0] * 9, None, 300),
        (Phase.HOST, [60.0] * 9, None, 600),
        (Phase.CHECKPOINT, [1.0] * 9, None, 1800),
        (Phase.DEVICE, [1.0] * 9, None, 360),  # who waits for a peer lets the peer speak first
        (Phase.EVALUATE, [1.0] * 9, None, 1800),
        (Phase.INPUT, [60.0] * 9, 5, 5),
        (Phase.DEVICE, [60.0] * 9, 5, 65),
        (Phase.START, [], 5, 1800),
        (Phase.START, [], 7200, 7200),
    ],
)
def test_how_long_a_phase_may_last(phase: Phase, durations: list[float], override: float | None, limit: float) -> None:
    assert hang.limit_seconds(phase, pace_of(durations), override) == limit


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200))
def test_the_pace_is_the_median_of_the_newest_64_steps(durations: list[int]) -> None:
    pace = pace_of(durations)
    newest = sorted(durations[-64:])
    assert newest[(len(newest) - 1) // 2] <= pace.median_seconds <= newest[len(newest) // 2]
    assert (pace.steps, pace.last) == (len(durations), len(durations))
