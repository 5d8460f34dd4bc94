"""The report's pieces, as text: numbers, axes, curves, and what hostile names do to the page."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.trainer.gang import run_spec
from tests.trainer.histories import history_of, typical, with_attempts
from tpu_trainer.clock import Phase
from tpu_trainer.contract import ExitCode
from tpu_trainer.doctor.finding import Finding
from tpu_trainer.outcome import Outcome
from tpu_trainer.spec import RunSpec, parse_run_spec
from tpu_trainer.telemetry.history import Attempt, History, Recorded, Warned
from tpu_trainer.telemetry.report import charts
from tpu_trainer.telemetry.report.axis import axis_of, step_axis
from tpu_trainer.telemetry.report.page import ENDINGS, render_report
from tpu_trainer.telemetry.report.recipe import recipe_rows
from tpu_trainer.telemetry.report.words import THIN, duration, number, share
from tpu_trainer.telemetry.sample import Sample

WHEN = datetime(2026, 11, 21, 16, 0, tzinfo=UTC)
SPEC = parse_run_spec(run_spec())
SCALING = [
    {"name": "slice", "tunedOn": "v5litepod-4", "runsOn": "v5litepod-8", "rule": ""},
    {"name": "learning rate", "tunedOn": "0.15", "runsOn": "0.3", "rule": "0.15 x 2 = 0.3 (linear rule)"},
    {"name": "milestones", "tunedOn": "16, 32", "runsOn": "8, 16", "rule": "the same examples"},
    {"name": "weight decay", "tunedOn": "1e-4", "runsOn": "1e-4", "rule": "as in the recipe"},
]
SCALED = parse_run_spec(run_spec(scaling=SCALING))
RUNNING = Attempt(1, 0, 0, {})


def page_of(recorded: Recorded, spec: RunSpec = SPEC, outcome: Outcome | None = None) -> str:
    return render_report(recorded, spec, outcome, {"torch": "2.9.0"}, WHEN)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.35481, "0.355"),
        (0.00123, "0.00123"),
        (-2.5, "−2.5"),
        (0.000123, "1.23·10⁻⁴"),
        (1e-30, "1·10⁻³⁰"),
        (999.9, "1,000"),
        (4940.0, "4,940"),
        (9999.6, "10 k"),
        (48_300, "48.3 k"),
        (999_600, "1 M"),
        (1.2e6, "1.2 M"),
        (3e9, "3 G"),
        (2.5e12, "2.5·10¹²"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text.replace(" ", THIN)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0_ms"),
        (1e-7, "<_0.01_ms"),
        (0.00042, "0.42_ms"),
        (0.85, "850_ms"),
        (0.9999, "1_s"),
        (3.2, "3.2_s"),
        (59.99, "1_min 00_s"),
        (245, "4_min 05_s"),
        (7500, "2_h 05_min"),
        (273_600, "3_d 4_h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text.replace("_", THIN)


@pytest.mark.parametrize(
    ("part", "text"), [(0, "0.0_%"), (1e-6, "<_0.1_%"), (0.0571, "5.7_%"), (0.4, "40_%"), (1, "100_%")]
)
def test_shares(part: float, text: str) -> None:
    assert share(part) == text.replace("_", THIN)


numbers = st.floats(-1e299, 1e299)


@settings(deadline=None)
@given(st.lists(numbers, max_size=20), st.booleans(), st.booleans())
def test_an_axis_holds_all_its_values_and_its_ticks_rise(values: list[float], zero: bool, logarithm: bool) -> None:
    axis = axis_of(values, from_zero=zero, logarithm=logarithm)
    assert axis.low < axis.high
    assert all(0 <= axis.place(value) <= 1 for value in values)
    slack = 1e-6 * (axis.high - axis.low)
    assert all(axis.low - slack <= value <= axis.high + slack for value in values)
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert 1 <= len(axis.ticks) <= 9


@settings(deadline=None)
@example(0, 13)
@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_steps_are_labelled_at_whole_numbers_inside_the_axis(first: int, more: int) -> None:
    axis = step_axis(first, first + more)
    assert all(tick == int(tick) and axis.low <= tick <= axis.high for tick in axis.ticks)
    assert len(axis.ticks) <= 7


def test_losses_that_are_far_apart_are_drawn_on_a_logarithmic_axis() -> None:
    assert axis_of([0.01, 8.0], logarithm=True).ticks == pytest.approx((0.01, 0.1, 1.0))
    assert not axis_of([1.0, 2.0], logarithm=True).logarithmic
    assert not axis_of([0.0, 2.0], logarithm=True).logarithmic


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(), min_size=1, max_size=300))
def test_any_losses_make_a_drawing_inside_its_frame(losses: list[float]) -> None:
    history = History()
    history.sample(Sample(len(losses), tuple(losses), 0.1, 1.0, {}))
    chart = charts.loss_chart(history.recorded(RUNNING))
    tree = ElementTree.fromstring(f"<p>{chart}</p>")
    for path in tree.iter("path"):
        places = path.attrib["d"].replace("Z", "").replace("h0", "")
        for place in places.replace("M", "L").split("L")[1:]:
            x, *y = place.replace("V", " ").replace("H", " ").split()
            assert 0 <= float(x) <= 1000
            assert all(0 <= float(value) <= 1000 for value in y)


def test_the_curve_is_interrupted_where_the_loss_is_not_finite() -> None:
    chart = str(charts.loss_chart(history_of(40, broken=(11, 12, 30)).recorded(RUNNING)))
    line = next(part for part in chart.split("<path ") if part.startswith('class="line training"'))
    assert line.count("M") == 3
    assert chart.count('class="broken"') == 3


def test_a_hundred_thousand_steps_make_a_page_of_a_quarter_megabyte() -> None:
    assert len(page_of(history_of(100_000, every=50).recorded(Attempt(1, 0, 100_000, {})))) < 250_000


def test_every_exit_code_has_words() -> None:
    assert set(ENDINGS) == set(ExitCode)


class Elements(HTMLParser):
    """The tags of a page, its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = "</title></style></svg>\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}"


def test_hostile_names_and_messages_stay_text() -> None:
    spec = parse_run_spec(
        run_spec(
            job={"namespace": HOSTILE, "name": HOSTILE, "uid": "u", "attempt": 1},
            parameters={HOSTILE: HOSTILE},
            dataUri=HOSTILE,
            scaling=[dict.fromkeys(("name", "tunedOn", "runsOn", "rule"), HOSTILE)],
        )
    )
    history = history_of(20)
    history.evaluated(20, {"loss": 0.4, HOSTILE: 0.5})
    history.finding(Finding(HOSTILE, 20, HOSTILE))
    recorded = history.recorded(Attempt(1, 0, 20, {Phase.DEVICE: 1.0}, HOSTILE))
    page = render_report(recorded, spec, Outcome(ExitCode.UserError, HOSTILE), {HOSTILE: HOSTILE}, WHEN)

    plain = Elements(page_of(typical(), SCALED))
    found = Elements(page)
    assert found.tags <= plain.tags
    assert found.attributes <= plain.attributes
    assert found.text.count(HOSTILE) >= 11


def test_the_page_names_nothing_outside_of_itself() -> None:
    page = page_of(typical())
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert not {"script", "img", "iframe", "object"} & Elements(page).tags


def test_a_failure_is_told_whole_and_a_traceback_keeps_its_lines() -> None:
    message = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: no'
    page = page_of(typical(), outcome=Outcome(ExitCode.UserError, message))
    assert "Failed in the task&#39;s code" in page
    assert message in Elements(page).text


def test_an_attempt_that_left_no_word_is_said_to_have_left_none() -> None:
    killed, present = Attempt(1, 0, 50, {}), Attempt(2, 40, 80, {})
    text = Elements(page_of(with_attempts(history_of(80), killed, present))).text
    assert "Without a word" in text
    assert "40 to 80" in text
    assert "Running" in text


def test_a_warning_says_how_often_it_came_and_what_to_do() -> None:
    warned = Warned("InputBound", 900, 2700, 3, "read ahead more")
    text = Elements(page_of(Recorded(attempts=(RUNNING,), warnings=(warned,)))).text
    assert "3 times, steps 900 to 2,700" in text
    assert "read ahead more" in text


def test_the_noise_scale_says_what_twice_the_slice_would_buy() -> None:
    recorded = Recorded(attempts=(RUNNING,), noise_scale=float(2 * SPEC.batch.total))
    # (1 + 2) / (1 + 1).
    assert "2 times the global batch" in page_of(recorded)
    assert "1.5 times fewer steps" in page_of(recorded)


COSINE = {"name": "Cosine", "factor": "0.1"}
STEP = {"name": "Step", "milestones": [8, 16]}
OFTEN = {"uri": "gs://b/c", "everySteps": 8, "everyMinutes": 15, "keep": 2}
SELDOM = {"uri": "gs://b/c", "keep": 1}


@pytest.mark.parametrize(
    ("changes", "name", "value", "note"),
    [
        ({}, "Global batch", "16 examples", "8 replicas × 2 per replica"),
        ({}, "Learning rate", "0.3", "after warm-up; then constant"),
        ({}, "Warm-up", "5 steps", f"21{THIN}% of the training"),
        ({"schedule": COSINE}, "Learning rate", "0.3", "after warm-up; then cosine down to 0.1 of it"),
        ({"schedule": STEP}, "Learning rate", "0.3", "after warm-up; then × 0.1 at steps 8, 16"),
        ({"emaDecay": "0.9999"}, "Average of weights", "0.9999", "decay per step"),
        ({"evaluateEverySteps": 1}, "Evaluation", "every step", "and at the end"),
        ({"checkpoint": OFTEN}, "Checkpoint", "every 8 steps or 15 minutes", "to gs://b/c, the last 2 are kept"),
        ({"checkpoint": SELDOM}, "Checkpoint", "when it ends", "to gs://b/c, the last 1 is kept"),
    ],
)
def test_the_recipe_is_told_with_the_rule_behind_it(
    changes: dict[str, object], name: str, value: str, note: str
) -> None:
    row = next(row for row in recipe_rows(parse_run_spec(run_spec(**changes))) if row.name == name)
    assert (row.value, row.note) == (value, note)


@pytest.mark.parametrize("row", SCALING, ids=lambda row: str(row["name"]))
def test_a_scaled_recipe_is_told_from_where_it_was_tuned_to_where_it_runs(row: dict[str, str]) -> None:
    cells = [row["name"].capitalize(), row["tunedOn"], row["runsOn"], row["rule"]]
    assert "".join(cells) in Elements(page_of(typical(), SCALED)).text


def test_what_differs_from_where_the_recipe_was_tuned_stands_out() -> None:
    page = page_of(typical(), SCALED)
    assert "<b>0.3</b>" in page
    assert "<b>1e-4</b>" not in page


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ({"name": "Constant"}, ("Constant", "after warm-up")),
        (COSINE, ("Cosine", "down to 0.1 of it after warm-up")),
        (STEP, ("Step", "× 0.1 at every milestone")),
    ],
    ids=["constant", "cosine", "step"],
)
def test_beside_the_scaled_numbers_the_recipe_is_what_no_rule_changes(
    schedule: dict[str, object], told: tuple[str, str]
) -> None:
    spec = parse_run_spec(
        run_spec(scaling=SCALING, schedule=schedule, emaDecay="0.9", evaluateEverySteps=8, checkpoint=SELDOM)
    )
    rows = {row.name: (row.value, row.note) for row in recipe_rows(spec)}
    assert rows == {
        "Schedule": told,
        "Optimizer": ("sgd", "momentum 0.9"),
        "Checkpoint": ("when it ends", "to gs://b/c, the last 1 is kept"),
        "Seed": ("3", ""),
    }
