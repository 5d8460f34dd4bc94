"""Renders the page: an HTML document that loads nothing and runs no script."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from xml.etree.ElementTree import Element

from tpu_training_operator.html_report import charts
from tpu_training_operator.html_report.ending import ENDINGS, JobEnd, badge, closing_words, has_failed, what_went_wrong
from tpu_training_operator.html_report.formatting import count, duration, number, plural, share
from tpu_training_operator.html_report.history import FirstLoss, History, Measurements, RecordedRunSpec
from tpu_training_operator.html_report.ladder import RungRow, ladder
from tpu_training_operator.html_report.markup import Content, aside, figure, html, key, pair, section, table, tag
from tpu_training_operator.html_report.metrics import evaluations, logged_values
from tpu_training_operator.html_report.numbers import key_numbers
from tpu_training_operator.html_report.recipe import recipe_rows

PHASES = {
    "start": ("Start", "imports, meeting the other hosts, placing the model, reading a checkpoint"),
    "input": ("Waiting for input", "the next batch was not ready"),
    "host": ("Host", "Python: the task's code, and tracing its steps"),
    "device": ("Device", "waiting for results: compiling, computing, exchanging gradients"),
    "checkpoint": ("Checkpoints", "while the training waited for them"),
    "evaluate": ("Evaluation", "going through the evaluation set"),
}

OWN_LOOP = {
    "start": ("Start", "imports, and everything else before the first step"),
    "host": ("Loop", "your own loop: input, steps, and what it does between them"),
    "checkpoint": PHASES["checkpoint"],
    "evaluate": PHASES["evaluate"],
}
"""The phases that a user's own loop reports."""

SHORTEST = 0.001
"""The fewest seconds for which a phase has a row."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(history: History, end: JobEnd | None = None, rungs: Sequence[RungRow] = ()) -> str:
    """Returns the page as HTML, without sections that have no content. `end`: how the job as a whole ended, if known;
    `rungs`: its ladder, if `end` is None."""
    spec, measured = history.run_spec, history.recorded
    split = {phase: sum(attempt.split.get(phase, 0.0) for attempt in measured.attempts) for phase in PHASES}
    sections = (
        _header(history, end),
        what_went_wrong(history, end),
        key_numbers(measured, spec, sum(split.values())),
        ladder(end.rungs if end else rungs),
        _loss(measured),
        logged_values(measured),
        evaluations(measured, spec),
        _throughput(measured, spec),
        _time(split, measured, OWN_LOOP if spec.entrypoint is None else PHASES),
        _warnings(measured, has_failed(history, end)),
        _recipe(measured, spec),
        _attempts(history),
        _environment(history),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{spec.job.name}: {badge(history, end).words} · training report"),
        tag("style", _style()),
    )
    return "<!doctype html>\n" + html(tag("html", head, tag("body", tag("main", sections)), lang="en")) + "\n"


def _header(history: History, end: JobEnd | None) -> Element:
    spec, state = history.run_spec, badge(history, end)
    job, where = spec.job, spec.slice
    written = tag("time", f"{history.written:%Y-%m-%d %H:%M %Z}", datetime=history.written.isoformat())
    facts: tuple[Content | list[Content], ...] = (
        f"{where.generation} {where.topology}",
        plural(where.slices, "slice") if where.slices > 1 else None,
        "rehearsed on CPU" if spec.hardware == "CPU" else None,
        plural(where.hosts, "host"),
        plural(where.replicas, "replica"),
        f"attempt {history.recorded.attempts[-1].number}",
        ["as of ", written] if state.kind == "running" else written,
    )
    namespace = None if job.namespace == "default" else tag("span", f"{job.namespace}/", class_="namespace")
    return tag(
        "header",
        tag("p", "Training report", class_="eyebrow"),
        tag("div", tag("h1", namespace, job.name), tag("p", state.words, class_=f"badge {state.kind}"), class_="title"),
        tag("p", (tag("span", fact) for fact in facts if fact is not None), class_="facts"),
        closing_words(history, end),
    )


def _loss(measured: Measurements) -> Element | None:
    if not measured.losses:
        return None
    columns, extent = charts.loss_columns(measured), charts.extent(measured.losses)
    broken = sum(point.broken for point in measured.losses)
    lost = f"The loss of {plural(broken, 'step')} was NaN or infinite" if broken else ""
    if extent is None:
        return section("loss", "Loss", tag("p", f"{lost}, so there is no curve.", class_="note"))
    spread = ": mean and range" if any(point.count > 1 for point in columns) else ""
    logarithmic = ", on a logarithmic axis" if charts.loss_axis(measured).logarithmic else ""
    evaluated, restarts = charts.evaluated_loss(measured), charts.restarts(measured)
    keys = tag(
        "p",
        key("training", f"training{spread}{logarithmic}"),
        None if evaluated is None else key("evaluation", "evaluation"),
        key("broken", "not finite") if broken else None,
        key("mark", "a new attempt") if restarts else None,
        class_="keys",
    )
    lost = f" {lost}: marked at the top, left out of the curve." if broken else ""
    return section("loss", "Loss", keys, charts.loss_chart(measured), tag("p", f"{extent}.{lost}", class_="note"))


def _throughput(measured: Measurements, spec: RecordedRunSpec) -> Element | None:
    drawing = charts.throughput_chart(measured, spec.batch.total)
    if drawing is None:
        return None
    rate = measured.examples_per_second
    keys = tag(
        "p",
        key("throughput", "examples per second, without evaluations"),
        None if rate is None else key("level", f"{number(rate)} after compilation"),
        key("mark", "a new attempt") if charts.restarts(measured) else None,
        class_="keys",
    )
    return section("throughput", "Throughput", keys, drawing)


def _time(split: Mapping[str, float], measured: Measurements, words: Mapping[str, tuple[str, str]]) -> Element | None:
    split = {phase: seconds for phase, seconds in split.items() if phase in words and seconds >= SHORTEST}
    total, attempts = sum(split.values()), len(measured.attempts)
    if not total:
        return None
    rows = [
        tag(
            "tr",
            tag("th", tag("i", class_=f"swatch {phase}"), words[phase][0], scope="row"),
            tag("td", duration(seconds), class_="right"),
            tag("td", share(seconds / total), class_="right"),
            tag("td", words[phase][1], class_="apart wide"),
        )
        for phase, seconds in split.items()
    ]
    over = f", over {plural(attempts, 'attempt')}" if attempts > 1 else ""
    note = f"Measured by the reporting replica. {duration(total)} in all{over}."
    return section(
        "time",
        "Where the time went",
        charts.split_bar({phase: (words[phase][0], seconds) for phase, seconds in split.items()}),
        table(["Phase", "Time", "Share", "What it is"], rows, right=(1, 2), apart=(3,), wide=(3,), class_="split"),
        tag("p", note, _first_loss(measured.attempts[-1].first_loss, attempts), class_="note"),
    )


def _warnings(measured: Measurements, has_failed: bool) -> Element | None:
    """Lists the doctor's warnings. Reports that there are none only for a run that has trained and has not failed."""
    items = []
    for warned in measured.warnings:
        often = f"{count(warned.times)} times, steps {count(warned.first)} to {count(warned.last)}"
        when = often if warned.times > 1 else f"step {count(warned.first)}"
        heading = tag("p", tag("strong", warned.check), " ", tag("span", when, class_="where"))
        items.append(tag("li", heading, tag("p", warned.message)))
    if items:
        return section("warnings", "Warnings", tag("ul", items, class_="warnings"))
    if has_failed or not measured.stretches:
        return None
    return section("warnings", "Warnings", tag("p", "The doctor found no problems.", class_="none"))


def _recipe(measured: Measurements, spec: RecordedRunSpec) -> Element:
    scaled = [
        tag(
            "tr",
            tag("th", row.name[:1].upper() + row.name[1:], scope="row"),
            tag("td", row.tuned_on),
            tag("td", tag("b", row.runs_on) if row.runs_on != row.tuned_on else row.runs_on),
            tag("td", row.rule),
        )
        for row in spec.scaling
    ]
    pairs = (
        pair(row.name, tag("b", row.value), " " if row.note else None, aside(row.note)) for row in recipe_rows(spec)
    )
    drawn = {
        "Learning rate": charts.rate_chart(measured),
        "Gradient norm, before clipping": charts.norm_chart(measured),
    }
    figures = [figure(caption, drawing) for caption, drawing in drawn.items() if drawing is not None]
    noise = _noise_sentence(measured, spec)
    return section(
        "recipe",
        "The recipe on this slice",
        table(["", "Tuned on", "Runs on", "Rule"], scaled, class_="scaling") if scaled else None,
        tag("table", tag("tbody", pairs), class_="pairs"),
        tag("div", figures, class_="small") if figures else None,
        None if noise is None else tag("p", noise, class_="note"),
    )


def _noise_sentence(measured: Measurements, spec: RecordedRunSpec) -> str | None:
    """Returns what twice the slice would gain: the steps to a loss grow with 1 + noise scale / batch (McCandlish et al.
    2018)."""
    scale, batch = measured.noise_scale, spec.batch.total
    if scale is None:
        return None
    fewer = (1 + scale / batch) / (1 + scale / (2 * batch))
    return (
        f"The gradient noise scale ({number(scale)} examples) is {number(scale / batch)} times the global batch: twice "
        f"the replicas, each with the same batch, would need {number(fewer)} times fewer steps to the same loss (2 is "
        "the most possible, 1 is no gain)."
    )


def _attempts(history: History) -> Element | None:
    """Lists the attempts; None for a single one, about which the rest of the page says everything."""
    *earlier, newest = history.recorded.attempts
    if not earlier:
        return None
    ended = None if history.outcome is None else history.outcome.code
    # An earlier attempt without an outcome was killed, or lost its machine.
    endings = [(attempt, attempt.outcome, "Ended without a message") for attempt in earlier]
    rows = [
        tag(
            "tr",
            tag("th", str(attempt.number), scope="row"),
            tag("td", f"{count(attempt.first)} to {count(attempt.last)}", class_="right"),
            tag("td", duration(sum(attempt.split.values())), class_="right"),
            tag("td", ENDINGS.get(outcome or "", ("", unknown))[1], class_="apart"),
        )
        for attempt, outcome, unknown in [*endings, (newest, newest.outcome or ended, "Running")]
    ]
    heads = ["Attempt", "Steps", "Time", "Ended"]
    return section("attempts", "Attempts", table(heads, rows, right=(1, 2), apart=(3,), class_="attempts"))


def _first_loss(first: FirstLoss | None, attempts: int) -> str | None:
    if first is None:
        return None
    programs = plural(first.compilations, "program")
    compiling = f", {duration(first.compiling)} of it to compile {programs}" if first.compilations else ""
    which = "The newest attempt" if attempts > 1 else "It"
    return f" {which} needed {duration(first.seconds)} until its first loss{compiling}."


def _environment(history: History) -> Element:
    spec = history.run_spec
    known = {
        "Entrypoint": spec.entrypoint or "none: trainer.command",
        "Backend": f"{spec.backend} on {spec.hardware}",
        **history.environment,
    }
    pairs = [*known.items(), *((f"parameter {name}", value) for name, value in spec.parameters.items())]
    rows = (pair(name, value) for name, value in pairs)
    return section("environment", "Environment", tag("table", tag("tbody", rows), class_="pairs"))


@cache
def _style() -> str:
    return files("tpu_training_operator.html_report").joinpath("report.css").read_text(encoding="utf-8")
