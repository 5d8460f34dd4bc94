"""The report's pieces: numbers, axes, curves, the recipe, and what hostile names do to the page."""

import json
import math
from contextlib import suppress
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.unit.histories import attempt, document, history, losses_of, page_of, run_of, typical, warned
from tpu_training_operator.html_report import charts
from tpu_training_operator.html_report.formatting import THIN, duration, number, share
from tpu_training_operator.html_report.history import UnreadableHistory, parse_history
from tpu_training_operator.html_report.page import recipe_rows, render
from tpu_training_operator.html_report.plot import Plot, axis_of, step_axis

SCALING = [
    {"name": "slice", "tunedOn": "v5litepod-4", "runsOn": "v5litepod-8", "rule": ""},
    {"name": "learning rate", "tunedOn": "0.15", "runsOn": "0.3", "rule": "0.15 x 2 = 0.3 (linear rule)"},
    {"name": "milestones", "tunedOn": "16, 32", "runsOn": "8, 16", "rule": "the same examples"},
    {"name": "weight decay", "tunedOn": "1e-4", "runsOn": "1e-4", "rule": "as in the recipe"},
]


STEERED = {
    "checkpoint": {"uri": "gs://b/c", "keep": 1, "keepBest": {"metric": "f1", "mode": "Max"}},
    "stopEarly": {"metric": "ppl", "mode": "Min", "patience": 2, "minDelta": "0.1"},
}


def test_warnings_of_the_plan_are_among_the_warnings_and_not_among_the_numbers() -> None:
    text = "the training makes 75 updates <b>"
    row = {"name": "warning", "tunedOn": "", "runsOn": "", "rule": text}
    page = page_of(typical(), spec={"scaling": [*SCALING, row]})
    assert page.count("the training makes 75 updates &lt;b&gt;") == 1
    assert page.index("the training makes 75") < page.index("The recipe on this slice")


def test_numbers_have_few_digits_and_a_unit() -> None:
    shown = {
        0.0: "0",
        1.0: "1",
        0.35481: "0.355",
        0.00123: "0.00123",
        -2.5: "−2.5",
        0.000123: "1.23·10⁻⁴",
        1e-30: "1·10⁻³⁰",
        999.9: "1,000",
        4940.0: "4,940",
        9999.6: "10_k",
        48_300: "48.3_k",
        999_600: "1_M",
        1.2e6: "1.2_M",
        3e9: "3_G",
        2.5e12: "2.5·10¹²",
        math.inf: "∞",
        -math.inf: "−∞",
        math.nan: "NaN",
    }
    assert {value: number(value).replace(THIN, "_") for value in shown} == shown


def test_durations_and_shares_never_round_to_nothing() -> None:
    durations = {
        0: "0_ms",
        1e-7: "<_0.01_ms",
        0.00042: "0.42_ms",
        0.85: "850_ms",
        0.9999: "1_s",
        3.2: "3.2_s",
        59.99: "1_min 00_s",
        245: "4_min 05_s",
        7500: "2_h 05_min",
        273_600: "3_d 4_h",
    }
    shares = {0: "0.0_%", 1e-6: "<_0.1_%", 0.0571: "5.7_%", 0.4: "40_%", 1: "100_%"}
    assert {seconds: duration(seconds).replace(THIN, "_") for seconds in durations} == durations
    assert {part: share(part).replace(THIN, "_") for part in shares} == shares


def paths_of(plot: Plot | None) -> dict[str, list[str]]:
    """The drawing's paths by class; none without a plot."""
    found: dict[str, list[str]] = {}
    for kind, path in plot.paths() if plot else ():
        found.setdefault(kind, []).append(path)
    return found


numbers = st.floats(-1e299, 1e299)


@example([5e-324, 1.0], False, True)
@example([1e-299, 1e299], False, True)
@given(st.lists(numbers, max_size=20), st.booleans(), st.booleans())
def test_an_axis_holds_all_its_values_and_its_ticks_rise(values: list[float], zero: bool, logarithm: bool) -> None:
    axis = axis_of(values, from_zero=zero, logarithm=logarithm)
    assert axis.low < axis.high
    assert all(0 <= axis.place(value) <= 1 for value in values)
    slack = 1e-6 * (axis.high - axis.low)
    assert all(axis.low - slack <= value <= axis.high + slack for value in values)
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert 1 <= len(axis.ticks) <= 9


@example(0, 13)
@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_steps_are_labelled_at_whole_numbers_inside_the_axis(first: int, more: int) -> None:
    axis = step_axis(first, first + more)
    assert all(tick == int(tick) and axis.low <= tick <= axis.high for tick in axis.ticks)
    assert len(axis.ticks) <= 7


def test_losses_that_are_far_apart_are_drawn_on_a_logarithmic_axis() -> None:
    assert axis_of([0.05, 2.0], logarithm=True).ticks == pytest.approx((0.05, 0.1, 0.2, 0.5, 1, 2))
    assert axis_of([0.0118, 2.3], logarithm=True).ticks == pytest.approx((0.01, 0.03, 0.1, 0.3, 1, 3))
    assert axis_of([2e-5, 8.0], logarithm=True).ticks == pytest.approx([10.0**power for power in range(-5, 2)])
    assert axis_of([2e-9, 8.0], logarithm=True).ticks == pytest.approx([10.0**power for power in range(-9, 2, 2)])
    assert not axis_of([1.0, 2.0], logarithm=True).logarithmic
    assert not axis_of([0.0, 2.0], logarithm=True).logarithmic


@settings(max_examples=60)
@given(st.lists(st.floats(), min_size=1, max_size=300))
def test_any_losses_make_a_drawing_inside_its_frame(losses: list[float]) -> None:
    for paths in paths_of(charts.loss_plot(history({"losses": losses_of(losses)}))).values():
        places = "".join(paths).replace("Z", "").replace("h0", "")
        for place in places.replace("M", "L").split("L")[1:]:
            x, *y = place.replace("V", " ").replace("H", " ").split()
            assert 0 <= float(x) <= 1000
            assert all(0 <= float(value) <= 1000 for value in y)


@settings(max_examples=40)
@given(st.lists(st.floats(-1e30, 1e30) | st.just(math.nan), min_size=1, max_size=700))
def test_merging_a_curve_keeps_its_mean_its_extremes_and_its_broken_steps(losses: list[float]) -> None:
    points = charts.merge(history({"losses": losses_of(losses)}).losses)
    finite = [loss for loss in losses if math.isfinite(loss)]
    weights = [point.count - point.broken for point in points]
    total = math.fsum(weight * (point.mean or 0.0) for weight, point in zip(weights, points, strict=True))
    assert len(points) <= charts.COLUMNS
    assert (sum(weights), sum(point.count for point in points)) == (len(finite), len(losses))
    assert total == pytest.approx(math.fsum(finite), rel=1e-9, abs=1e-12 * sum(map(abs, finite)))
    assert min((p.low for p in points if p.low is not None), default=None) == min(finite, default=None)
    assert max((p.high for p in points if p.high is not None), default=None) == max(finite, default=None)


def test_the_curve_is_interrupted_where_the_loss_is_not_finite() -> None:
    paths = paths_of(charts.loss_plot(history(run_of(40, broken=(11, 12, 30)))))
    assert [line.count("M") for line in paths["line training"]] == [3]
    # Neighbours are one mark.
    assert len(paths["broken"]) == 2


def test_a_page_of_2000_points_a_curve_stays_below_a_quarter_megabyte() -> None:
    assert len(page_of(run_of(2000, every=1))) < 250_000


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


HOSTILE = "</title></style></svg>\"'><script>alert(1)</script><img src=x onerror=alert(1)>&amp;"


def test_hostile_names_and_messages_stay_text() -> None:
    spec = {
        "job": {"namespace": HOSTILE, "name": HOSTILE, "uid": "u", "attempt": 1},
        "parameters": {HOSTILE: HOSTILE},
        "dataUri": HOSTILE,
        "scaling": [dict.fromkeys(("name", "tunedOn", "runsOn", "rule"), HOSTILE)],
    }
    recorded = run_of(20) | {
        "evaluations": [{"step": step, "metrics": {"loss": 0.4, HOSTILE: 0.5}} for step in (10, 20)],
        "logged": [{"name": HOSTILE, "stride": 1, "points": losses_of([0.5, 0.25])}],
        "warnings": [warned(HOSTILE, HOSTILE, 20)],
        "attempts": [attempt(1, 0, 20, HOSTILE)],
    }
    page = page_of(recorded, spec=spec, outcome={"code": HOSTILE, "message": HOSTILE}, environment={HOSTILE: HOSTILE})
    plain, found = Elements(page_of(typical(), spec={"scaling": SCALING})), Elements(page)
    assert found.tags <= plain.tags
    assert found.attributes <= plain.attributes
    assert found.text.count(HOSTILE) >= 14


def test_logged_values_have_a_curve_and_a_row_each_and_those_that_are_not_finite_are_counted() -> None:
    names = [f"value {number}" for number in range(20)]
    logged = [{"name": name, "stride": 1, "points": losses_of([0.5, math.nan, 0.25, math.nan])} for name in names]
    never = {"name": "never", "stride": 1, "points": losses_of([math.nan])}
    found = Elements(page_of(run_of(20) | {"logged": [*logged, never, {"name": "none", "stride": 1, "points": []}]}))
    assert all(f"{name}not finite0.250.52" in found.text for name in names)
    assert "nevernot finite––1" in found.text
    assert sum(found.text.count(f"step 3: {name} 0.25") for name in names) == charts.MOST_CHARTS


def test_the_learning_rate_is_drawn_from_the_first_step_to_the_last() -> None:
    recorded = run_of(40, every=20)
    warmup = [{"step": step, "rate": step / 10} for step in (1, 2, 3, 4)]
    ((_, plot),) = charts.recipe_plots(history(recorded | {"rates": {"stride": 1, "points": warmup}}))
    (line,) = paths_of(plot)["line rate"]
    # 40 steps are 1000 wide: the four of the warm-up, then one for each stretch.
    assert [float(place.split()[0]) for place in line[1:].split("L")] == [25, 50, 75, 100, 500, 1000]


def test_without_learning_rates_of_single_steps_the_stretches_are_drawn() -> None:
    assert [caption for caption, _ in charts.recipe_plots(history(run_of(40, every=20)))] == ["Learning rate"]
    assert list(charts.recipe_plots(history(run_of(40, every=40)))) == []


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["accuracy", "top5"], {"accuracy": ["accuracy"], "top5": ["top5"]}),
        (["clean/f1", "noisy/f1", "clean/em"], {"f1": ["clean", "noisy"], "clean/em": ["clean/em"]}),
        (["f1", "noisy/f1"], {"f1": ["f1", "noisy"]}),
        ([f"{number}/f1" for number in range(7)], {f"{number}/f1": [f"{number}/f1"] for number in range(7)}),
        ([], {}),
    ],
    ids=["no sets", "two sets", "an unnamed set", "too many sets", "nothing"],
)
def test_the_validation_sets_of_a_metric_share_its_chart(names: list[str], shown: dict[str, list[str]]) -> None:
    found = charts.panels(names)
    assert {title: list(labels.values()) for title, labels in found} == shown
    assert sorted(name for _, labels in found for name in labels) == sorted(names)


def test_a_chart_of_several_validation_sets_has_a_line_and_a_colour_for_each() -> None:
    evaluations = [{"step": step, "metrics": {"a/f1": step / 40, "b/f1": step / 50}} for step in (10, 20, 30)]
    page = page_of(run_of(30) | {"evaluations": evaluations})
    assert page.count("<figcaption>f1</figcaption>") == 1
    assert 'class="line evaluation"' in page
    assert 'class="line evaluation set-2"' in page
    assert 'evaluation set-2">b</span>' in page


def test_the_best_evaluation_is_marked_named_and_comes_first() -> None:
    values = [(10, 0.5, 9.0, 0.1), (20, 0.75, 7.0, 0.2), (30, 0.625, 8.0, 0.3)]
    evaluations = [{"step": step, "metrics": {"other": x, "ppl": ppl, "f1": f1}} for step, f1, ppl, x in values]
    page = page_of(run_of(30) | {"evaluations": evaluations}, spec=STEERED)
    text = Elements(page).text
    assert "f10.625best 0.75 at step 20" in text
    assert "ppl8best 7 at step 20" in text
    assert page.count('class="best"') == 2
    assert "Best f1: 0.75 at step 20" in text
    assert "Best ppl: 7 at step 20; " in text
    assert "after 2 evaluations in a row" in text
    assert "by more than 0.1." in text
    assert "f10.6250.5100.7520" in text


def test_neighbouring_steps_that_are_not_finite_are_one_stretch_and_its_area() -> None:
    found = paths_of(charts.loss_plot(history(run_of(40, broken=(11, 12, 13, 40)))))
    assert found["broken"] == ["M275.0 0H325.0", "M1000.0 0H1000.0"]
    assert len(found["lost"]) == 1


def test_every_later_attempt_is_marked_where_it_began() -> None:
    attempts = [attempt(1, 0, 25, "PeerLost"), attempt(2, 20, 40, "Succeeded")]
    measured = history(run_of(40) | {"attempts": attempts})
    assert paths_of(charts.loss_plot(measured))["mark"] == ["M500.0 0V300"]
    assert paths_of(charts.throughput_plot(measured))["mark"] == ["M500.0 0V300"]


def test_least_and_greatest_loss_are_named_with_their_steps() -> None:
    assert "Min 1 (step 3), max 4 (step 2" in page_of({"losses": losses_of([2.0, 4.0, 1.0, math.inf])})
    merged = {"step": 128, "count": 64, "mean": 2.0, "low": 1.5, "high": 3.0, "broken": 0}
    merged_page = page_of({"losses": [merged]})
    assert "Min 1.5 (steps 65 to 128)" in merged_page
    assert "max 3 (steps 65 to 128)" in merged_page


def test_the_page_names_nothing_outside_of_itself() -> None:
    page = page_of(typical())
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert not {"script", "img", "iframe", "object"} & Elements(page).tags


def test_a_failure_is_shown_whole_and_a_traceback_keeps_its_lines() -> None:
    message = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: no'
    text = Elements(page_of(typical(), outcome={"code": "UserError", "message": message})).text
    assert "Failed in the task's code" in text
    assert message in text


def test_an_attempt_without_an_outcome_ended_without_a_message_unless_it_is_the_last() -> None:
    text = Elements(page_of(run_of(80) | {"attempts": [attempt(1, 0, 50), attempt(2, 40, 80)]})).text
    assert "Ended without a message" in text
    assert "40 to 80" in text
    assert "Running" in text


def test_a_warning_says_how_often_it_came_and_what_to_do() -> None:
    text = Elements(page_of({"warnings": [warned("InputBound", "use more workers", 900, 1800, 2700)]})).text
    assert "3 times, steps 900 to 2,700" in text
    assert "use more workers" in text


def test_of_a_loop_of_the_users_own_the_page_shows_only_what_it_tells() -> None:
    recorded = run_of(100)
    silent = recorded | {"stretches": [{**each, "learning_rate": math.nan} for each in recorded["stretches"]]}
    page = page_of(silent, spec={"entrypoint": None})
    assert "none: trainer.command" in page
    assert "your own loop" in page
    assert [words for words in ("Waiting for input", "<figcaption>Learning rate", "nan") if words in page] == []
    assert "<figcaption>Learning rate" in page_of(recorded, spec={"entrypoint": None})


def test_the_noise_scale_says_what_twice_the_slice_would_gain() -> None:
    page = page_of({"noise_scale": 32.0})
    # The global batch is 16: (1 + 2) / (1 + 1).
    assert "2 times the global batch" in page
    assert "1.5 times fewer steps" in page


COSINE = {"name": "Cosine", "factor": "0.1"}
STEP = {"name": "Step", "milestones": [8, 16]}
PLATEAU = {"name": "Plateau", "milestones": [], "factor": "0.5", "metric": "f1", "mode": "Max", "patience": 2}
OFTEN = {"uri": "gs://b/c", "everySteps": 8, "everySeconds": 900, "keep": 2}
SELDOM = {"uri": "gs://b/c", "keep": 1}


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({}, ("Schedule", "Constant", "after warm-up")),
        ({"schedule": COSINE}, ("Schedule", "Cosine", "down to 0.1 of it after warm-up")),
        ({"schedule": COSINE | {"factor": None}}, ("Schedule", "Cosine", "down to 0 after warm-up")),
        ({"schedule": STEP}, ("Schedule", "Step", "× 0.1 at every milestone")),
        ({"schedule": PLATEAU}, ("Schedule", "Plateau", "× 0.5 on a plateau of f1")),
        ({}, ("Optimizer", "sgd", "momentum 0.9")),
        (STEERED, ("Checkpoint", "when it ends", "to gs://b/c, the last 1 is kept, and the one with the best f1")),
        ({"checkpoint": OFTEN}, ("Checkpoint", "every 8 steps or 15 minutes", "to gs://b/c, the last 2 are kept")),
        (
            {"checkpoint": SELDOM | {"initFrom": {"uri": "gs://b/w", "strict": True}}},
            ("Initial weights", "gs://b/w", ""),
        ),
        ({"checkpoint": SELDOM}, ("Checkpoint", "when it ends", "to gs://b/c, the last 1 is kept")),
        ({}, ("Seed", "3", "")),
    ],
)
def test_beside_the_scaled_numbers_the_recipe_is_what_no_rule_changes(
    changes: dict[str, Any], row: tuple[str, str, str]
) -> None:
    assert row in [*recipe_rows(history(spec=changes))]


def test_a_scaled_recipe_is_shown_where_it_was_tuned_and_where_it_runs() -> None:
    page = page_of(typical(), spec={"scaling": SCALING})
    text = Elements(page).text
    for row in SCALING:
        assert "".join([row["name"].capitalize(), row["tunedOn"], row["runsOn"], row["rule"]]) in text
    # What differs stands out.
    assert "<b>0.3</b>" in page
    assert "<b>1e-4</b>" not in page


def test_a_page_is_well_formed_and_a_drawings_label_is_for_screen_readers(snapshot: SnapshotAssertion) -> None:
    main = page_of(typical()).partition("<main>")[2].partition("</main>")[0]
    label = next(ElementTree.fromstring(f"<main>{main}</main>").iter("svg")).attrib["aria-label"]
    assert label == snapshot


def changed(value: Any, path: tuple[int, ...], new: Any) -> Any:
    """The document with the value replaced to which the path leads: the place in each list or object on the way."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = keys[path[0] % len(keys)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    parts = {name: changed(part, path[1:], new) if name == key else part for name, part in items}
    return parts if isinstance(value, dict) else list(parts.values())


WILD = [None, True, -1, 0, 10**400, -0.0, 5e-324, 1e308, math.nan, math.inf, -math.inf, "", "1e400", HOSTILE, [], {}]
DOCUMENT = json.loads(
    document(run_of(30) | {"logged": [{"name": "a", "stride": 1, "points": losses_of([1.0, 2.0])}]}, STEERED)
)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple), st.sampled_from(WILD))
def test_whatever_a_document_holds_it_is_shown_or_refused(path: tuple[int, ...], new: Any) -> None:
    content = json.dumps(changed(DOCUMENT, path, new)).encode()
    with suppress(UnreadableHistory):
        assert render(parse_history(content)).endswith("</html>\n")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "not JSON: ", id="empty"),
        pytest.param(b'{"schema": "hist', "not JSON: ", id="torn"),
        pytest.param(b"[1]", 'reads "history/v1", got None', id="not an object"),
        pytest.param(b'{"schema": "history/v9"}', "got 'history/v9'", id="another version"),
        pytest.param(
            json.dumps(json.loads(document()) | {"runSpec": {}}).encode(),
            "runSpec.job.namespace: Field required",
            id="no run spec",
        ),
        pytest.param(document({"attempts": []}), "recorded.attempts: ", id="no attempt"),
    ],
)
def test_a_file_that_is_not_a_history_is_refused_with_the_reason(content: bytes, why: str) -> None:
    with pytest.raises(UnreadableHistory) as refused:
        parse_history(content)
    assert why in str(refused.value)
