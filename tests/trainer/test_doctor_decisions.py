"""What the doctor makes of numbers: which are worth a person's time, and how often they are spoken of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tpu_trainer.backends.base import Counters
from tpu_trainer.clock import Phase
from tpu_trainer.doctor import hang, padding
from tpu_trainer.doctor.counts import WARM_UP_STEPS, WINDOW_STEPS, StepCounts, minus
from tpu_trainer.doctor.finding import Finding
from tpu_trainer.doctor.pace import Pace
from tpu_trainer.doctor.parties import odd_ones, replicas
from tpu_trainer.doctor.shapes import difference, shapes_of
from tpu_trainer.doctor.vitals import Straggler, Vitals, input_share, long_enough, straggler
from tpu_trainer.doctor.voice import Voice


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


def test_a_difference_of_shapes_names_the_place_and_both_shapes() -> None:
    first, now = shapes_of([torch.zeros(8, 64), torch.zeros(8)]), shapes_of([torch.zeros(8, 57), torch.zeros(8)])
    assert difference(first, now) == "batch[0] is [8, 57] float32, in the first step it was [8, 64] float32"
    assert difference(first, first) is None
    assert difference({"batch[0]": "[8] int64"}, {}) == "batch[0] is missing, in the first step it was [8] int64"


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
def test_the_odd_ones_are_those_outside_the_largest_party(values: str, odd: tuple[list[int], list[int]] | None) -> None:
    assert odd_ones(values) == odd


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_the_odd_ones_and_the_others_are_all_the_replicas(values: list[str]) -> None:
    if (parties := odd_ones(values)) is None:
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


def test_a_cause_is_spoken_of_again_only_when_it_is_ten_times_worse() -> None:
    told: list[Finding] = []
    voice = Voice(told.append)
    for step, severity in enumerate([1.0, 2.0, 9.9, 10.0, 50.0, 100.0]):
        voice.say("InputBound", step, "slow", severity=severity)
    assert [finding.step for finding in told] == [0, 3, 5]


def test_every_check_and_every_cause_is_spoken_of_by_itself() -> None:
    told: list[Finding] = []
    voice = Voice(told.append)
    for check, cause in [("A", None), ("A", 1), ("A", 2), ("B", 1), ("A", 1)]:
        voice.say(check, 0, "text", cause=cause)
    assert len(told) == 4


class Device:
    """Counters as a run would leave them: `step` does what a step of the trainer does, plus what the task causes."""

    def __init__(self) -> None:
        self.now = Counters()
        self.told: list[Finding] = []
        self.counts = StepCounts(self, Voice(self.told.append), executions=1)
        self._step = 0

    def compilations(self) -> int:
        return self.now.compilations

    def counters(self) -> Counters:
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
def test_what_a_step_does_beside_the_trainers_own_work_is_put_down_to_one_cause(
    events: dict[str, Any], found: list[str]
) -> None:
    assert warm_device().steps(3 * WINDOW_STEPS, **events) == found


def test_a_read_every_tenth_step_is_nobodys_concern() -> None:
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
    assert finding.message.startswith(f"step {WARM_UP_STEPS + 6} compiled a new program, 2.5 s")
    assert "batch is [9] float32, in the first step it was [8] float32" in finding.message


def test_a_recompilation_with_the_same_shapes_points_at_the_program() -> None:
    device = warm_device()
    device.steps(1, compilations=1)
    assert "PT_XLA_DEBUG_LEVEL=1" in device.told[0].message


def test_a_hundred_recompilations_are_told_three_times() -> None:
    device = warm_device()
    device.steps(100, compilations=1)
    assert [finding.step - WARM_UP_STEPS for finding in device.told] == [1, 10, 100]
    assert "(the 100th time)" in device.told[-1].message
    assert device.counts.compilations == 100


def test_what_an_evaluation_does_is_not_laid_to_a_step() -> None:
    device = warm_device()
    for _ in range(WINDOW_STEPS):
        assert device.steps(1) == []
        with device.counts.set_aside():
            device.add(compilations=3, executions=50, host_reads=50, fallbacks={"aten::nonzero": 9})
    assert device.counts.compilations == 0


def test_setting_work_aside_keeps_what_steps_have_done() -> None:
    device = warm_device()
    for step in range(WINDOW_STEPS):
        found = device.steps(1, host_reads=1, executions=1)
        with device.counts.set_aside():
            device.add(host_reads=7)
        assert found == ([] if step + 1 < WINDOW_STEPS else ["HostSync"])


def test_the_difference_of_two_counts_knows_operations_that_only_the_later_one_has() -> None:
    later = Counters(3, 2.5, 10, 4, {"aten::nonzero": 3, "aten::_unique2": 1})
    assert minus(later, Counters(1, 0.5, 4, 4, {"aten::nonzero": 2})) == Counters(
        2, 2.0, 6, 0, {"aten::nonzero": 1, "aten::_unique2": 1}
    )


def hosts(*work: float, waiting: float = 0.0, total: float = 10.0) -> list[Vitals]:
    return [Vitals(host, waiting, seconds, total, 0) for host, seconds in enumerate(work)]


@pytest.mark.parametrize(
    ("vitals", "found"),
    [
        (hosts(4.0, 4.1, 3.9, 4.0), None),
        (hosts(4.0, 4.0, 8.0, 4.0), Straggler(2, 2.0, 0.4, input_bound=False)),
        (hosts(9.0, 3.0), Straggler(0, 3.0, 0.6, input_bound=False)),
        (hosts(4.0, 4.0, 5.9, 4.0), None),  # less than half as long again
        (hosts(0.1, 0.1, 0.5, 0.1), None),  # five times as long, and less than 5 % of the step
        (hosts(9.0), None),
        ([Vitals(0, 0.0, 1.0, 10.0, 0), Vitals(0, 0.0, 9.0, 10.0, 0)], None),  # two processes of one host
        (hosts(4.0, 9.0, waiting=5.0), Straggler(1, 2.25, 0.5, input_bound=True)),
    ],
)
def test_a_straggler_is_much_slower_than_the_others_and_costs_them_time(
    vitals: list[Vitals], found: Straggler | None
) -> None:
    assert straggler(vitals) == found


def test_the_input_of_the_gang_is_that_of_the_host_that_waits_longest() -> None:
    assert input_share([Vitals(0, 1.0, 2.0, 10.0, 0), Vitals(3, 4.0, 5.0, 10.0, 0)]) == (3, 0.4)


def test_two_seconds_of_steps_are_the_least_that_is_judged() -> None:
    assert not long_enough(hosts(0.1, total=1.9))
    assert long_enough(hosts(0.1, total=2.0))


@given(
    st.integers(0, 2**16), st.floats(0, 1e4, width=32), st.integers(0, 2**20), st.integers(0, 2**16 - 1), st.integers(0)
)
def test_vitals_survive_the_float32_row_they_travel_in(
    host: int, seconds: float, compilations: int, high: int, low: int
) -> None:
    vitals = Vitals(host, seconds, seconds, seconds, compilations, (high, low % 2**16))
    assert Vitals.of(torch.tensor(vitals.row(), dtype=torch.float32).tolist()) == vitals


def linears(*sizes: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(*pair) for pair in pairwise(sizes)])


@pytest.mark.parametrize(
    ("model", "rows", "words"),
    [
        (linears(1024, 1024), 8, None),
        (linears(1024, 1024), 4, ["50%", "4 examples per replica are computed as 8 rows"]),
        (linears(1024, 1024), 1000, None),
        (linears(1000, 1000), 64, None),  # 5 % of filling
        (linears(1050, 1050), 64, ["17%", "0.weight [1050, 1050] is computed as [1152, 1152]"]),
        (linears(65, 200, 65), 4, None),  # too small to be what a step waits for
    ],
)
def test_filling_is_spoken_of_where_it_is_a_tenth_of_large_products(
    model: nn.Module, rows: int, words: list[str] | None
) -> None:
    advice = padding.padding_advice(padding.products_of(model), rows, per_replica=rows)
    assert (advice is None) == (words is None)
    assert all(word in (advice or "") for word in words or [])


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 300))
def test_sizes_that_fill_their_tiles_waste_nothing_and_no_advice_is_above_all(
    outputs: int, inputs: int, rows: int
) -> None:
    whole = padding.Product("w", outputs * 128, inputs * 128)
    assert padding.padding_advice([whole], rows * 8, rows * 8) is None
    ragged = padding.Product("w", outputs, inputs)
    assert ragged.padded >= ragged.useful


def test_products_are_the_matrices_that_activations_meet_each_once() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(50, 16), "body": nn.Linear(16, 32), "norm": nn.LayerNorm(32)})
    head = nn.Linear(16, 50, bias=False)
    head.weight = model["tokens"].weight
    again = nn.Linear(16, 50, bias=False)
    again.weight = head.weight
    model.update({"head": head, "again": again})
    found = {(product.outputs, product.inputs) for product in padding.products_of(model)}
    assert found == {(32, 16), (50, 16)}
    assert len(padding.products_of(model)) == 2


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ([torch.zeros(6, 784), torch.zeros(6)], 3),
        ([torch.zeros(6, dtype=torch.int64)], 3),
        ({"ids": torch.zeros(6, 50, dtype=torch.int64)}, 150),
        (torch.zeros(6, 50, 32), 150),
        ([], 3),
    ],
)
def test_rows_are_a_replicas_examples_times_their_positions(batch: Any, rows: int) -> None:
    assert padding.rows_of(batch, per_replica=3) == rows


def pace_of(durations: Sequence[float]) -> Pace:
    times = iter([0.0, *(sum(durations[: count + 1]) for count in range(len(durations)))])
    pace = Pace(lambda: next(times))
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
        (Phase.CHECKPOINT, [1.0] * 9, None, 300),
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
