"""The whole page: an HTML document that loads nothing and runs no script."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from xml.etree.ElementTree import Element

from tpu_training_operator.report import charts
from tpu_training_operator.report.formatting import count, duration, number, plural, share
from tpu_training_operator.report.history import FirstLoss, History, Measured, RunSpec
from tpu_training_operator.report.markup import Content, html, tag
from tpu_training_operator.report.recipe import recipe_rows

CHARTED_METRICS = 12
"""Metrics with a chart of their own; the table has all of them."""

HEADLINES = 2
"""Metrics of the last evaluation among the key numbers: the first ones that the task gives."""

ENDINGS = {
    "Succeeded": ("well", "Succeeded"),
    "Preempted": ("pause", "Stopped on request"),
    "UserError": ("bad", "Failed in the task's code"),
    "NotFinite": ("bad", "Loss not finite"),
    "PeerLost": ("bad", "Lost a peer"),
    "InternalError": ("bad", "Failed in the trainer"),
    "Hung": ("bad", "Hung"),
    "StorageFailed": ("bad", "Storage failed"),
    "Diverged": ("bad", "Replicas diverged"),
    "StorageDenied": ("bad", "Storage denied"),
    "BadSpec": ("bad", "Refused the run spec"),
}
"""By the name of the trainer's exit code: the class that colours it, and the words."""

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
"""A loop of the user's own tells no other phases."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Tile:
    """One key number, and what to compare it with."""

    name: str
    value: str
    note: str


def render(history: History) -> str:
    spec, measured = history.run_spec, history.recorded
    split = {phase: sum(attempt.split.get(phase, 0.0) for attempt in measured.attempts) for phase in PHASES}
    sections = (
        _header(history),
        _numbers(measured, spec, sum(split.values())),
        _loss(measured),
        _logged(measured),
        _evaluations(measured),
        _throughput(measured, spec),
        _time(split, len(measured.attempts), OWN_LOOP if spec.entrypoint is None else PHASES),
        _warnings(measured),
        _recipe(measured, spec),
        _attempts(measured),
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
        tag("title", f"{spec.job.namespace}/{spec.job.name} · training report"),
        tag("style", _style()),
    )
    return "<!doctype html>\n" + html(tag("html", head, tag("body", tag("main", sections)), lang="en")) + "\n"


def _header(history: History) -> Element:
    spec = history.run_spec
    job, where, outcome = spec.job, spec.slice, history.outcome
    state, ending = ENDINGS.get(outcome.code, ("bad", outcome.code)) if outcome else ("running", "Running")
    facts: tuple[Content, ...] = (
        f"{where.generation} {where.topology}",
        plural(where.slices, "slice") if where.slices > 1 else None,
        "rehearsed on CPU" if spec.hardware == "CPU" else None,
        plural(where.hosts, "host"),
        plural(where.replicas, "replica"),
        f"attempt {history.recorded.attempts[-1].number}",
        tag("time", f"{history.written:%Y-%m-%d %H:%M %Z}", datetime=history.written.isoformat()),
    )
    message = outcome.message if outcome else ""
    return tag(
        "header",
        tag("p", "Training report", class_="eyebrow"),
        tag(
            "div",
            tag("h1", tag("span", f"{job.namespace}/", class_="namespace"), job.name),
            tag("p", ending, class_=f"badge {state}"),
            class_="title",
        ),
        tag("p", (tag("span", fact) for fact in facts if fact is not None), class_="facts"),
        # A traceback keeps its lines.
        tag("pre", message, class_=f"message {state}") if "\n" in message else None,
        tag("p", message, class_="said") if message and "\n" not in message else None,
    )


def _numbers(measured: Measured, spec: RunSpec, seconds: float) -> Element:
    """Key numbers, most wanted first; a number that the run does not have has no tile."""
    attempts = measured.attempts
    tiles = [
        Tile("Steps", count(attempts[-1].last), f"of {count(spec.train_steps)}"),
        *_loss_tiles(measured),
        *_speed_tiles(measured, spec),
        Tile("Time", duration(seconds), plural(len(attempts), "attempt")),
    ]
    # At most five columns, as many as fill the last row best.
    columns = -(-len(tiles) // -(-len(tiles) // 5))
    shown = (tag("div", tag("dt", tile.name), tag("dd", tile.value, tag("small", tile.note))) for tile in tiles)
    return tag(
        "section",
        tag("dl", shown, class_="tiles", style=f"--columns: {columns}"),
        id="numbers",
        aria_label="Key numbers",
    )


def _loss_tiles(measured: Measured) -> Iterator[Tile]:
    losses = [(point.step, point.mean) for point in measured.losses if point.mean is not None]
    if losses:
        (step, last), (_, first) = losses[-1], losses[0]
        note = f"from {number(first)}" if len(losses) > 1 else f"at step {count(step)}"
        yield Tile("Training loss", number(last), note)
    for evaluation in measured.evaluations[-1:]:
        for name, value in list(evaluation.metrics.items())[:HEADLINES]:
            yield Tile(name, number(value), f"evaluated at step {count(evaluation.step)}")


def _speed_tiles(measured: Measured, spec: RunSpec) -> Iterator[Tile]:
    rate = measured.examples_per_second
    if rate is not None:
        yield Tile("Examples per second", number(rate), f"{number(rate / spec.slice.replicas)} per replica")
    if measured.stretches:
        step = statistics.median(each.training_seconds / each.steps for each in measured.stretches)
        yield Tile("Step time", duration(step), "median")
    trained = sum(each.training_seconds for each in measured.stretches)
    if trained > 0 and spec.entrypoint is not None:
        waited = sum(each.split.get("input", 0.0) for each in measured.stretches)
        yield Tile("Waiting for input", share(waited / trained), "of the training time")
    if measured.mfu is not None:
        yield Tile("Model flops utilisation", share(measured.mfu), "of the slice's peak")
    if measured.noise_scale is not None:
        yield Tile("Gradient noise scale", number(measured.noise_scale), "examples")


def _loss(measured: Measured) -> Element:
    if not measured.losses:
        return _section("loss", "Loss", tag("p", "No step was done.", class_="none"))
    merged = any(point.count > 1 for point in charts.loss_columns(measured))
    logarithmic = charts.loss_axis(measured).logarithmic
    curve = f"training{': mean and range' if merged else ''}{', on a logarithmic axis' if logarithmic else ''}"
    broken = sum(point.broken for point in measured.losses)
    keys = tag(
        "p",
        _key("training", curve),
        _key("evaluation", "evaluation") if charts.evaluations_of(measured, "loss") else None,
        _key("broken", "not finite") if broken else None,
        class_="keys",
    )
    note = f"The loss of {plural(broken, 'step')} was NaN or infinite: marked at the top, left out of the curve."
    return _section(
        "loss", "Loss", keys, charts.loss_chart(measured), tag("p", note, class_="note") if broken else None
    )


def _evaluations(measured: Measured) -> Element | None:
    if not any(evaluation.metrics for evaluation in measured.evaluations[-1:]):
        return None
    rows = []
    for name, last in measured.evaluations[-1].metrics.items():
        values = [each.metrics[name] for each in charts.evaluations_of(measured, name)]
        least, greatest = (number(min(values)), number(max(values))) if values else ("–", "–")
        cells = (tag("td", text, class_="right") for text in (number(last), least, greatest))
        rows.append(tag("tr", tag("th", name, scope="row"), cells))
    names = dict.fromkeys(name for evaluation in measured.evaluations for name in evaluation.metrics)
    # The evaluated loss is drawn beside the training's, and a single value is not a curve.
    drawn = [name for name in names if name != "loss" and len(charts.evaluations_of(measured, name)) > 1]
    figures = [
        tag("figure", tag("figcaption", name), charts.metric_chart(measured, name)) for name in drawn[:CHARTED_METRICS]
    ]
    return _section(
        "evaluations",
        "Evaluations",
        tag("div", figures, class_="small") if figures else None,
        _table(["Metric", "Last", "Least", "Greatest"], rows, right=(1, 2, 3)),
    )


def _logged(measured: Measured) -> Element | None:
    """What the task has logged in training."""
    if not measured.logged:
        return None
    rows: list[Element] = []
    figures: list[Element] = []
    for logged in measured.logged:
        finite = [point for point in logged.points if charts.drawable(point.low) and charts.drawable(point.high)]
        values = [value for point in finite for value in (point.low, point.high) if value is not None]
        least, greatest = (number(min(values)), number(max(values))) if values else ("–", "–")
        last = logged.points[-1] if logged.points else None
        newest = "–" if last is None else "not finite" if last.mean is None else number(last.mean)
        broken = sum(point.broken for point in logged.points)
        texts = (newest, least, greatest, count(broken) if broken else "–")
        cells = (tag("td", text, class_="right") for text in texts)
        rows.append(tag("tr", tag("th", logged.name, scope="row"), cells))
        if len(finite) > 1 and len(figures) < CHARTED_METRICS:
            figures.append(tag("figure", tag("figcaption", logged.name), charts.logged_chart(measured, logged)))
    return _section(
        "logged",
        "Logged in training",
        tag("div", figures, class_="small") if figures else None,
        _table(["Name", "Last", "Least", "Greatest", "Not finite"], rows, right=(1, 2, 3, 4)),
    )


def _throughput(measured: Measured, spec: RunSpec) -> Element:
    if not measured.stretches:
        return _section("throughput", "Throughput", tag("p", "No step was done.", class_="none"))
    rate = measured.examples_per_second
    keys = tag(
        "p",
        _key("throughput", "examples per second, without evaluations"),
        None if rate is None else _key("level", f"{number(rate)} after compilation"),
        class_="keys",
    )
    return _section("throughput", "Throughput", keys, charts.throughput_chart(measured, spec.batch.total))


def _time(split: Mapping[str, float], attempts: int, words: Mapping[str, tuple[str, str]]) -> Element:
    split = {phase: seconds for phase, seconds in split.items() if phase in words}
    whole = sum(split.values())
    rows = [
        tag(
            "tr",
            tag("th", tag("i", class_=f"swatch {phase}"), words[phase][0], scope="row"),
            tag("td", duration(seconds) if seconds else "–", class_="right"),
            tag("td", share(seconds / whole) if seconds else "–", class_="right"),
            tag("td", words[phase][1], class_="apart wide"),
        )
        for phase, seconds in split.items()
    ]
    over = f", over {plural(attempts, 'attempt')}" if attempts > 1 else ""
    return _section(
        "time",
        "Where the time went",
        charts.split_bar(split),
        _table(["Phase", "Time", "Share", "What it is"], rows, right=(1, 2), apart=(3,), wide=(3,), class_="split"),
        tag("p", f"Measured by the reporting replica. {duration(whole)} in all{over}.", class_="note"),
    )


def _warnings(measured: Measured) -> Element:
    items = []
    for warned in measured.warnings:
        often = f"{count(warned.times)} times, steps {count(warned.first)} to {count(warned.last)}"
        when = often if warned.times > 1 else f"step {count(warned.first)}"
        heading = tag("p", tag("strong", warned.check), " ", tag("span", when, class_="where"))
        items.append(tag("li", heading, tag("p", warned.message)))
    found = tag("ul", items, class_="warnings") if items else tag("p", "The doctor found no problems.", class_="none")
    return _section("warnings", "Warnings", found)


def _recipe(measured: Measured, spec: RunSpec) -> Element:
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
        _pair(row.name, tag("b", row.value), " " if row.note else None, _where(row.note)) for row in recipe_rows(spec)
    )
    rates = (
        tag("figure", tag("figcaption", "Learning rate"), charts.rate_chart(measured))
        if charts.has_rates(measured)
        else None
    )
    norms = charts.norm_chart(measured)
    noise = _noise_sentence(measured, spec)
    return _section(
        "recipe",
        "The recipe on this slice",
        _table(["", "Tuned on", "Runs on", "Rule"], scaled, class_="scaling") if scaled else None,
        tag("div", tag("table", tag("tbody", pairs), class_="pairs"), rates, class_="beside"),
        None if norms is None else tag("figure", tag("figcaption", "Gradient norm, before clipping"), norms),
        None if noise is None else tag("p", noise, class_="note"),
    )


def _noise_sentence(measured: Measured, spec: RunSpec) -> str | None:
    """What twice the slice would buy: steps to a given loss go as 1 + noise scale / batch (McCandlish et al. 2018)."""
    scale, batch = measured.noise_scale, spec.batch.total
    if scale is None:
        return None
    fewer = (1 + scale / batch) / (1 + scale / (2 * batch))
    return (
        f"The gradient noise scale ({number(scale)} examples) is {number(scale / batch)} times the global batch: twice "
        f"the replicas, each with the same batch, would need {number(fewer)} times fewer steps to the same loss (2 is "
        "the most possible, 1 is no gain)."
    )


def _attempts(measured: Measured) -> Element:
    *_, newest = measured.attempts
    rows = []
    for attempt in measured.attempts:
        # An earlier attempt without an outcome was killed, or lost its machine.
        unknown = "Running" if attempt is newest else "Ended without a message"
        _, ending = ENDINGS.get(attempt.outcome or "", ("", unknown))
        rows.append(
            tag(
                "tr",
                tag("th", str(attempt.number), scope="row"),
                tag("td", f"{count(attempt.first)} to {count(attempt.last)}", class_="right"),
                tag("td", duration(sum(attempt.split.values())), class_="right"),
                tag("td", ending, class_="apart"),
            )
        )
    return _section(
        "attempts",
        "Attempts",
        _table(["Attempt", "Steps", "Time", "Ended"], rows, right=(1, 2), apart=(3,)),
        _first_loss(newest.first_loss),
    )


def _first_loss(first: FirstLoss | None) -> Element | None:
    if first is None:
        return None
    programs = plural(first.compilations, "program")
    compiling = f", {duration(first.compiling)} of it to compile {programs}" if first.compilations else ""
    text = f"The newest attempt needed {duration(first.seconds)} until its first loss{compiling}."
    return tag("p", text, class_="note")


def _environment(history: History) -> Element:
    spec = history.run_spec
    known = {
        "Entrypoint": spec.entrypoint or "none: trainer.command",
        "Backend": f"{spec.backend} on {spec.hardware}",
        **history.environment,
    }
    pairs = [*known.items(), *((f"parameter {name}", value) for name, value in spec.parameters.items())]
    rows = (_pair(name, value) for name, value in pairs)
    return _section("environment", "Environment", tag("table", tag("tbody", rows), class_="pairs"))


def _section(name: str, title: str, *content: Content) -> Element:
    return tag("section", tag("h2", title), content, id=name)


def _key(kind: str, text: str) -> Element:
    return tag("span", text, class_=f"key {kind}")


def _pair(name: str, *value: Content) -> Element:
    return tag("tr", tag("th", name, scope="row"), tag("td", value))


def _where(text: str) -> Element | None:
    return tag("span", text, class_="where") if text else None


def _table(
    heads: list[str],
    rows: list[Element],
    right: tuple[int, ...] = (),
    apart: tuple[int, ...] = (),
    wide: tuple[int, ...] = (),
    class_: str = "",
) -> Element:
    """`right`, `apart`, `wide`: the columns with these classes."""
    columns = {"right": right, "apart": apart, "wide": wide}
    classes = [" ".join(name for name, those in columns.items() if at in those) for at in range(len(heads))]
    cells = (
        tag("th", head, scope="col", **({"class": kind} if kind else {})) if head else tag("td")
        for head, kind in zip(heads, classes, strict=True)
    )
    return tag("table", tag("thead", tag("tr", cells)), tag("tbody", rows), **({"class": class_} if class_ else {}))


@cache
def _style() -> str:
    return files("tpu_training_operator.report").joinpath("report.css").read_text(encoding="utf-8")
