"""The history of a run: constant memory, nothing lost but detail, and continued by the next attempt."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.gang_processes import run_spec
from tests.trainer.histories import history_of
from tpu_contract.protocol import Phase
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract.findings import Finding
from tpu_trainer.reporting import history as module
from tpu_trainer.reporting.history import (
    KINDS_OF_FINDINGS,
    LOGGED_CURVES,
    AttemptRecord,
    RunHistory,
    Sample,
    Series,
    dump_history,
    load_history,
)
from tpu_trainer.task.logbook import LoggedCurve

ATTEMPT = AttemptRecord(1, 0, 0, {})


def written(history: RunHistory, uid: str = "5f0c") -> bytes:
    job = {"namespace": "default", "name": "small", "uid": uid, "attempt": 1}
    return dump_history(history.as_recorded(ATTEMPT), parse_run_spec(run_spec(job=job)), None, {}, datetime.now(UTC))


losses = st.lists(st.floats(-1e30, 1e30) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=33, max_size=200)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 8)


def of(history: RunHistory) -> SimpleNamespace:
    """What it has recorded."""
    return SimpleNamespace(**history.as_recorded(ATTEMPT))


def recorded(*samples: Sample) -> SimpleNamespace:
    history = RunHistory()
    for sample in samples:
        history.add_sample(sample)
    return of(history)


def sample(step: int, values: list[float], seconds: float = 1.0) -> Sample:
    split = {Phase.INPUT: seconds / 4, Phase.DEVICE: seconds / 2}
    return Sample(step, tuple(values), learning_rate=0.1 * step, seconds=seconds, split=split)


@given(st.integers(1, 5000))
@settings(max_examples=30)
def test_a_series_stays_small_and_all_its_points_but_the_last_stand_for_equally_many(count: int) -> None:
    whole: Series[int] = Series(lambda a, b: a + b)
    for _ in range(count):
        whole.add(1)
    *others, last = whole.points
    assert len(whole.points) <= module.LIMIT
    assert set(others) <= {whole.stride}
    assert 1 <= last <= whole.stride
    assert sum(whole.points) == count


@pytest.mark.usefixtures("small")
@settings(max_examples=40)
@given(values=losses)
def test_every_loss_keeps_its_weight_however_often_points_are_merged(values: list[float]) -> None:
    points = recorded(sample(len(values), values)).losses
    finite = [value for value in values if math.isfinite(value)]
    weights = [point.count - point.broken for point in points]
    mean = math.fsum(weight * (point.mean or 0.0) for weight, point in zip(weights, points, strict=True))
    assert len(points) <= 8
    assert (sum(point.count for point in points), sum(weights)) == (len(values), len(finite))
    assert mean == pytest.approx(math.fsum(finite), rel=1e-9, abs=1e-12 * sum(map(abs, finite)))


@pytest.mark.usefixtures("small")
@settings(max_examples=40)
@given(values=losses)
def test_lowest_and_highest_loss_are_never_smoothed_away(values: list[float]) -> None:
    points = recorded(sample(len(values), values)).losses
    finite = [value for value in values if math.isfinite(value)]
    assert min((p.low for p in points if p.low is not None), default=None) == min(finite, default=None)
    assert max((p.high for p in points if p.high is not None), default=None) == max(finite, default=None)


@pytest.mark.usefixtures("small")
@settings(max_examples=40)
@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=60))
def test_merged_stretches_add_up_to_the_time_and_the_steps_of_the_run(counts: list[int]) -> None:
    step, samples = 0, []
    for count in counts:
        step += count
        samples.append(sample(step, [1.0] * count, seconds=0.5 * count))
    stretches = recorded(*samples).stretches
    assert len(stretches) <= 8
    assert sum(s.steps for s in stretches) == step
    assert sum(s.seconds for s in stretches) == pytest.approx(0.5 * step)
    assert sum(s.split[Phase.INPUT] for s in stretches) == pytest.approx(0.125 * step)
    assert (stretches[-1].step, stretches[-1].learning_rate) == (step, pytest.approx(0.1 * step))


def test_a_samples_losses_belong_to_the_steps_up_to_its_own() -> None:
    points = recorded(sample(3, [9.0, 8.0, 7.0]), sample(5, [6.0, 5.0])).losses
    assert [(point.step, point.mean) for point in points] == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (5, 5.0)]


@pytest.mark.parametrize(
    ("norms", "kept"), [((1.0, 3.0), 2.0), ((1.0, math.inf, 4.0, math.nan), 2.5), ((math.nan,), None), ((), None)]
)
def test_a_stretch_has_the_mean_of_the_gradient_norms_that_are_finite(
    norms: tuple[float, ...], kept: float | None
) -> None:
    made = replace(sample(4, [1.0] * 4), gradient_norms=norms)
    assert recorded(made).stretches[0].gradient_norm == kept


@pytest.mark.usefixtures("small")
def test_merged_stretches_have_the_mean_gradient_norm_of_their_steps() -> None:
    samples = [replace(sample(step, [1.0]), gradient_norms=(float(step),)) for step in range(1, 17)]
    norms = [(stretch.gradient_norm, stretch.steps) for stretch in recorded(*samples).stretches]
    assert sum(norm * steps for norm, steps in norms) == pytest.approx(sum(range(1, 17)))


@pytest.mark.parametrize("count", [1, 8, 9, 1000])
def test_the_learning_rates_begin_with_the_first_step_however_long_the_run(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGGED_LIMIT", 8)
    rates = [replace(sample(step, [1.0]), learning_rates={step: step / 10}) for step in range(1, count + 1)]
    points = recorded(*rates).rates["points"]
    assert (points[0].step, points[0].rate) == (1, 0.1)
    assert len(points) <= 8
    assert all(point.rate == point.step / 10 for point in points)


def test_a_resumed_run_forgets_the_rates_of_the_steps_it_makes_again() -> None:
    history = RunHistory()
    history.add_sample(replace(sample(3, [1.0] * 3), learning_rates={1: 0.1, 2: 0.2, 3: math.nan}))
    after = load_history(written(history), "5f0c")
    after.forget_after(1)
    after.add_sample(replace(sample(2, [1.0]), learning_rates={2: 0.5}))
    assert [(point.step, point.rate) for point in of(after).rates["points"]] == [(1, 0.1), (2, 0.5)]


def test_a_rate_that_becomes_unknown_leaves_the_last_one() -> None:
    known = Sample(1, (1.0,), 0.1, 1.0, {}, examples_per_second=5.0, mfu=0.4, noise_scale=80.0)
    found = recorded(known, sample(2, [1.0]))
    assert (found.examples_per_second, found.mfu, found.noise_scale) == (5.0, 0.4, 80.0)


def test_findings_of_one_check_are_one_warning_with_its_number_and_the_last_message() -> None:
    history = RunHistory()
    for step in (30, 60, 90):
        history.add_finding(Finding("InputBound", step, f"waited until {step}"))
    (warned,) = of(history).warnings
    assert (warned.first, warned.last, warned.times, warned.message) == (30, 90, 3, "waited until 90")


def test_findings_of_ever_new_checks_do_not_fill_the_memory() -> None:
    history = RunHistory()
    for number in range(2 * KINDS_OF_FINDINGS):
        history.add_finding(Finding(f"Check{number}", 1, "found"))
    assert len(of(history).warnings) == KINDS_OF_FINDINGS


def test_values_of_ever_new_names_do_not_fill_the_memory() -> None:
    history = RunHistory()
    for number in range(2 * LOGGED_CURVES):
        history.add_curves([LoggedCurve(f"x{number}", ((1, 0.5),))])
    assert len(of(history).logged) == LOGGED_CURVES


def told(history: RunHistory) -> RunHistory:
    history.add_evaluation(20, {"accuracy": 0.5})
    history.add_curves([LoggedCurve("margin", ((10, 0.5), (20, math.nan), (30, 0.25)))])
    history.add_finding(Finding("InputBound", 20, "waits"))
    return history


def test_the_next_attempt_reads_what_the_last_one_has_written() -> None:
    before = told(history_of(40))
    after = load_history(written(before), "5f0c")
    assert after is not None
    again = of(after)
    (first, _) = again.attempts
    assert first == ATTEMPT
    assert vars(again) | {"attempts": (ATTEMPT,)} == vars(of(before))


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"schema": "hist', id="torn"),
        pytest.param(b"[1]", id="not an object"),
        pytest.param(b'{"schema": "history/v9", "uid": "5f0c", "recorded": {}}', id="another version"),
        pytest.param(b'{"schema": "history/v1", "uid": "5f0c", "recorded": {"strides": 1}}', id="another shape"),
        pytest.param(written(RunHistory(), "other"), id="another job"),
    ],
)
def test_a_history_of_something_else_is_ignored(document: bytes) -> None:
    assert load_history(document, "5f0c") is None


def test_steps_that_a_resumed_run_repeats_are_forgotten() -> None:
    history = told(history_of(40))
    history.add_evaluation(40, {"accuracy": 0.7})
    history.forget_after(25)
    until = of(history)
    assert [point.step for point in until.losses] == list(range(1, 26))
    assert [point.step for point in until.stretches] == [10, 20]
    assert [evaluation.step for evaluation in until.evaluations] == [20]
    (logged,) = until.logged
    assert [(point.step, point.mean, point.broken) for point in logged["points"]] == [(10, 0.5, 0), (20, None, 1)]
    assert [warned.check for warned in until.warnings] == ["InputBound"]


@pytest.mark.usefixtures("small")
def test_a_continued_series_stays_as_coarse_as_it_was() -> None:
    history = load_history(written(history_of(64)), "5f0c")
    history.add_sample(sample(72, [1.0] * 8))
    assert [point.count for point in of(history).losses] == [16] * 4 + [8]
