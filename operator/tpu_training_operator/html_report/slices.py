"""Makes the page that compares slices: hours against chip-hours, one dot a slice, and the table below."""

from collections.abc import Mapping, Sequence

from tpu_training_operator.html_report.page import template
from tpu_training_operator.html_report.plot import Curve, Plot, Point, axis_of

_KINDS = ("training", "evaluation", "evaluation set-2", "evaluation set-3", "evaluation set-4")


def render_slices(
    title: str,
    slices: Sequence[str],
    rows: Mapping[str, Sequence[str]],
    picture: tuple[str, Mapping[str, Sequence[Point]]],
    notes: Sequence[str],
) -> str:
    """Returns the page as HTML. `rows`: a value for each slice, by name. `picture`: its title, and the dots of each
    generation in the order of their size."""
    columns = ["", *(f"{head}|right" for head in slices)]
    cells = [[name, *values] for name, values in rows.items()]
    return template("slices.html").render(title=title, heads=columns, rows=cells, plot=_plot(*picture), notes=notes)


def _plot(title: str, generations: Mapping[str, Sequence[Point]]) -> Plot | None:
    dots = [dot for alike in generations.values() for dot in alike]
    if not dots:
        return None
    curves = [
        Curve(_KINDS[min(place, len(_KINDS) - 1)], generation, [alike], dotted=len(alike))
        for place, (generation, alike) in enumerate(generations.items())
    ]
    x, y = (axis_of(values, from_zero=True, logarithm=True) for values in ([d.x for d in dots], [d.y for d in dots]))
    legend = [(curve.kind, curve.name) for curve in curves] if len(curves) > 1 else []
    return Plot(title, x, y, curves, legend, labels=dots, x_name="chip-hours")
