"""Renders the page: an HTML document that loads nothing and runs no script. Its layout is the template `page.html`,
which escapes every value."""

import statistics
from collections.abc import Iterator, Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from tpu_contract.protocol import DEFAULT_FACTOR
from tpu_training_operator.api.decimals import readable
from tpu_training_operator.api.status import RungStatus
from tpu_training_operator.html_report import charts
from tpu_training_operator.html_report.ending import ENDINGS, JobEnd, badge, closing_words, failure, has_failed
from tpu_training_operator.html_report.formatting import count, duration, number, plural, share
from tpu_training_operator.html_report.history import History, RecordedCurve, Watched
from tpu_training_operator.html_report.plot import HEIGHT, WIDTH, drawable

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

HEADLINES = 2
"""The most metrics of the last evaluation among the key numbers: first those that the run watches."""


def render(history: History, end: JobEnd | None = None, rungs: Sequence[RungStatus] = ()) -> str:
    """Returns the page as HTML, without sections that have no content. `end`: how the job as a whole ended, if known;
    `rungs`: its ladder, if `end` is None."""
    rungs = end.rungs if end else rungs
    return template("page.html").render(
        history=history,
        badge=badge(history, end),
        failed=has_failed(history, end),
        closing=closing_words(history, end),
        where=end.where if end else "",
        failure=failure(history, end),
        tiles=list(_tiles(history)),
        rungs=[_rung_row(place, rung) for place, rung in enumerate(rungs, 1)],
        growth=charts.growth_plot(rungs),
        loss=charts.loss_plot(history),
        loss_note=charts.loss_note(history),
        logged=[_logged_row(logged) for logged in history.logged],
        logged_plots=list(charts.logged_plots(history)),
        metrics=[_metric_row(history, name) for name in history.metrics],
        metric_plots=list(charts.metric_plots(history)),
        consequences=list(_consequences(history)),
        throughput=charts.throughput_plot(history),
        phases=_phases(history),
        recipe=list(recipe_rows(history)),
        recipe_plots=list(charts.recipe_plots(history)),
        attempts=[_attempt_row(history, place) for place in range(len(history.attempts))],
    )


@cache
def template(name: str) -> Template:
    """Returns a page's layout, which escapes every value."""
    loader = PackageLoader("tpu_training_operator", "html_report")
    environment = Environment(
        loader=loader,
        autoescape=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {word.__name__: word for word in (count, duration, number, plural, share)}
    environment.globals |= {"WIDTH": WIDTH, "HEIGHT": HEIGHT}
    return environment.get_template(name)


def _tiles(history: History) -> Iterator[tuple[str, str, str, str]]:
    """Yields the key numbers, the most important first: name, value, a note to compare it with, and CSS class."""
    yield "Steps", count(history.attempts[-1].last), f"of {count(history.train_steps)}", ""
    losses = [(span.step, span.mean) for span in history.losses if span.mean is not None]
    if not history.ends_finite:
        note = f"{number(losses[-1][1])} at step {count(losses[-1][0])}" if losses else "in any step"
        yield "Training loss", "not finite", note, "bad"
    elif losses:
        note = f"from {number(losses[0][1])}" if len(losses) > 1 else f"at step {count(losses[0][0])}"
        yield "Training loss", number(losses[-1][1]), note, ""
    for last in history.evaluations[-1:]:
        best = {watched.metric: charts.best_of(history, watched) for watched in history.watched}
        for name in [name for name in dict.fromkeys([*best, *last.metrics]) if name in last.metrics][:HEADLINES]:
            value, note = last.metrics[name], f"at step {count(last.step)}"
            if (better := best.get(name)) is not None and better.metrics[name] != value:
                note = f"best {number(better.metrics[name])} at step {count(better.step)}"
            yield name, number(value), note, "" if drawable(value) else "bad"
    if (rate := history.examples_per_second) is not None:
        yield "Examples per second", number(rate), f"{number(rate / history.replicas)} per replica", ""
    if history.stretches:
        step = statistics.median(stretch.training_seconds / stretch.steps for stretch in history.stretches)
        yield "Step time", duration(step), "median", ""
    trained = sum(stretch.training_seconds for stretch in history.stretches)
    if trained > 0 and history.entrypoint is not None:
        waited = sum(stretch.split.get("input", 0.0) for stretch in history.stretches)
        yield "Waiting for input", share(waited / trained), "of the training time", ""
    if history.mfu is not None:
        yield "Model flops utilisation", share(history.mfu), "of the slice's peak", ""
    if history.noise_scale is not None:
        yield "Gradient noise scale", number(history.noise_scale), "examples", ""
    if (seconds := sum(_split(history).values())) > 0:
        yield "Time", duration(seconds), plural(len(history.attempts), "attempt"), ""


def _rung_row(place: int, rung: RungStatus) -> list[str]:
    numbers = [charts.read_drawable(text) for text in (rung.examples_per_second, rung.efficiency)]
    failed = [str(gate) for gate in rung.gates if not gate.passed]
    return [
        str(place),
        rung.slice,
        count(rung.chips),
        count(rung.global_batch_size),
        readable(rung.learning_rate),
        count(rung.steps),
        *("" if value is None else number(value) for value in numbers),
        escape(rung.verdict.value) + Markup("").join(map(Markup('<span class="where"> {}</span>').format, failed)),
    ]


def _logged_row(logged: RecordedCurve) -> list[str]:
    """Returns name, last, least and greatest value, and how many were not finite."""
    last = logged.points[-1] if logged.points else None
    newest = "–" if last is None else "not finite" if last.mean is None else number(last.mean)
    ends = charts.extremes(logged.points)
    least, greatest = ("–", "–") if ends is None else (number(ends[0][0]), number(ends[1][0]))
    broken = sum(span.broken for span in logged.points)
    return [logged.name, newest, least, greatest, count(broken) if broken else "–"]


def _metric_row(history: History, name: str) -> list[str]:
    """Returns the metric's name and last value, and its least and its greatest value, each with its step."""
    last = [evaluation for evaluation in history.evaluations if name in evaluation.metrics][-1].metrics[name]
    row = [name, number(last) if drawable(last) else Markup('<b class="bad">{}</b>').format(number(last))]
    for mode in ("Min", "Max"):
        extreme = charts.best_of(history, Watched(metric=name, mode=mode))
        row += ["–", "–"] if extreme is None else [number(extreme.metrics[name]), count(extreme.step)]
    return row


def _consequences(history: History) -> Iterator[str]:
    """Yields what follows from the metrics that the run watches."""
    for watched in history.watched:
        if (best := charts.best_of(history, watched)) is None:
            continue
        consequence = "the checkpoint of that step is kept"
        if watched is not history.keep_best and (stop := history.stop_early) is not None:
            by = f" by more than {number(stop.min_delta)}" if stop.min_delta else ""
            waits = plural(stop.patience, "evaluation")
            consequence = f"the training ends after {waits} in a row that are not better{by}"
        value = number(best.metrics[watched.metric])
        yield f"Best {watched.metric}: {value} at step {count(best.step)}; {consequence}."


def _split(history: History) -> dict[str, float]:
    """Returns the seconds of all attempts by phase."""
    return {phase: sum(attempt.split.get(phase, 0.0) for attempt in history.attempts) for phase in PHASES}


def _phases(history: History) -> list[tuple[str, str, str, float, float]]:
    """Returns the phases that took time: CSS class, name, meaning, seconds, and share of all."""
    words = OWN_LOOP if history.entrypoint is None else PHASES
    split = {phase: time for phase, time in _split(history).items() if phase in words and time >= SHORTEST}
    return [(phase, *words[phase], time, time / sum(split.values())) for phase, time in split.items()]


def recipe_rows(history: History) -> Iterator[tuple[str, str, str]]:
    """Yields what the table of scaled numbers does not show of the recipe: name, value and explanation."""
    factor = f"× {number(DEFAULT_FACTOR if history.factor is None else history.factor)}"
    lowest = f"down to {number(history.factor or 0)}{' of it' if history.factor else ''} after warm-up"
    explained = {
        "Constant": "after warm-up",
        "Step": f"{factor} at every milestone",
        "Plateau": f"{factor} on a plateau of {history.plateau_metric}",
    }
    yield "Schedule", history.schedule, explained.get(history.schedule, lowest)
    # Not rounded: epsilon 1e-7 and 1.4e-7 are different recipes.
    numbers = {"momentum": history.momentum, "ε": history.epsilon}
    known = ", ".join(f"{name} {value:.10g}" for name, value in numbers.items() if value is not None)
    yield "Optimizer", history.optimizer, known
    if history.checkpoint_uri is not None:
        seconds = history.save_every_seconds
        times = [(history.save_every_steps, "step")]
        times.append((seconds, "second") if seconds is None or seconds % 60 else (seconds // 60, "minute"))
        due = " or ".join(unit if every == 1 else plural(every, unit) for every, unit in times if every is not None)
        kept = f"the last {count(history.keep)} {'is' if history.keep == 1 else 'are'} kept"
        kept += f", and the one with the best {history.keep_best.metric}" if history.keep_best else ""
        yield "Checkpoint", f"every {due}" if due else "when it ends", f"to {history.checkpoint_uri}, {kept}"
    if history.init_from is not None:
        yield "Initial weights", history.init_from, ""
    if history.data_uri is not None:
        yield "Data", history.data_uri, ""
    yield "Seed", str(history.seed), ""


def _attempt_row(history: History, place: int) -> list[str]:
    attempt, newest = history.attempts[place], place == len(history.attempts) - 1
    outcome = attempt.outcome or (history.outcome if newest else None)
    # An earlier attempt without an outcome was killed, or lost its machine.
    _, ending = ENDINGS.get(outcome or "", ("", "Running" if newest else "Ended without a message"))
    steps = f"{count(attempt.first)} to {count(attempt.last)}"
    return [str(attempt.number), steps, duration(sum(attempt.split.values())), ending]
