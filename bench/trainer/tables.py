"""The results as the tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.trainer.compare import Spread, ratios
from bench.trainer.names import CHECKS, FEATURES, FEEDS, LOOPS, OUR_FEED, OURS, PLAIN, WITHOUT


def loops_table(part: Mapping[str, Any], names: Mapping[str, str] = LOOPS, own: str = OURS) -> str:
    """Shows steps per second of every loop, how many times as fast this trainer was, and the same of the host's time in
    a step, with the spread of the rounds. `names`: of what is compared; `own`: this trainer's."""
    rates, times = part["stepsPerSecond"], part["hostMilliseconds"]
    rows = [["loop", "steps/s", "this trainer is", "min..max", "host's ms per step", "this trainer's part", "min..max"]]
    for name, values in rates.items():
        rate, ratio = Spread.of(values), ratios(rates, own, name)
        time, share = Spread.of(times[name]), ratios(times, own, name)
        faster, less = ["", ""], ["", ""]
        if name != own:
            faster = [f"{ratio.median:.2f}x", _range(ratio, "{:.2f}")]
            less = [f"{share.median:.2f}", _range(share, "{:.2f}")]
        rows.append([names[name], f"{rate.median:.1f}", *faster, f"{time.median:.1f}", *less])
    return _captioned(part, rates[own], rows)


def images_table(part: Mapping[str, Any]) -> str:
    """Shows the loops that train on images, and the batches without a training, each as a step."""
    loops, feeds = ({**part, **part[name]} for name in ("loops", "feeds"))
    return f"{loops_table(loops)}\n\nThe same batches without a training:\n\n{loops_table(feeds, FEEDS, OUR_FEED)}"


def features_table(part: Mapping[str, Any]) -> str:
    """Shows what each feature adds to the time of a step, in percent."""
    rates = part["stepsPerSecond"]
    rows = [["switched on", "a step takes longer by", "min..max"]]
    for name, words in FEATURES.items():
        ratio = ratios(rates, WITHOUT[name], name)
        added = Spread(*(100 * (value - 1) for value in (ratio.median, ratio.least, ratio.greatest)))
        rows.append([words, f"{added.median:.1f} %", _range(added, "{:.1f}")])
    return _captioned(part, rates[PLAIN], rows)


def doctor_table(part: Mapping[str, Any]) -> str:
    """Shows what each check took of host 0's time in the first steps, and per step afterwards."""
    runs = part["runs"]
    rows = [["check", "first steps", "then per step", "of a step", "min..max"]]
    for check in runs[0]["perStep"]:
        start = Spread.of([1e3 * run["atStart"][check] for run in runs])
        each = Spread.of([1e6 * run["perStep"][check] for run in runs])
        share = Spread.of([100 * run["perStep"][check] / run["step"] for run in runs])
        numbers = [f"{start.median:.1f} ms", f"{each.median:.1f} us", f"{share.median:.2f} %", _range(share, "{:.2f}")]
        rows.append([CHECKS.get(check, check), *numbers])
    return _captioned(part, runs, rows)


def machine_line(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {machine[name]}" for name in machine if name not in ("cpus", "load"))
    return f"Measured on {machine['cpus']} CPU cores, load {machine['load']:.1f} before the start; {versions}."


def filled_in(document: str, name: str, text: str) -> str:
    """Returns the document with `text` between its lines `<!-- name -->` and `<!-- end -->`; unchanged without these
    lines."""
    before, begin, rest = document.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{begin}{text}\n{end}{after}" if begin and end else document


def _range(spread: Spread, form: str) -> str:
    return f"{form.format(spread.least)}..{form.format(spread.greatest)}"


def _captioned(part: Mapping[str, Any], rounds: Sequence[object], rows: Sequence[Sequence[str]]) -> str:
    """Draws a table, whose header is the first row."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    caption = f"Rounds: {len(rounds)}; a run is {part['steps']} steps, after {part['warmUp']} that are not timed."
    return "\n".join([caption, "", head, "|" + "---|" * len(rows[0]), *body])
