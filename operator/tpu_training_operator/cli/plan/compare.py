"""`tpujob plan --compare`: one recipe on several slices, side by side, and which of them is worth its chips."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from tpu_training_operator.api.words import count
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.cli.common.prices import Prices
from tpu_training_operator.cli.common.terminal import console
from tpu_training_operator.cli.plan.compile_results_file import CompiledSteps
from tpu_training_operator.cli.plan.moved import moved
from tpu_training_operator.cli.plan.step_times import unknown_times
from tpu_training_operator.domain.job.recipe.cost import Cost, StepTime, cost_of, cost_rows, to_same_loss
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.job.recipe.worth import CHEAPEST, LARGEST, MOST_LOST, Offer, marks


@dataclass(frozen=True)
class Column:
    """The job on one slice. `same_loss`: its cost if it trains to the loss of the recipe as tuned, None without a noise
    scale. `money`: what the chips cost, to the same loss where that is known. `lost`: the share of the chip-hours that
    the smallest slice of the generation does not need. `marks`: what is best about the slice."""

    resolution: Resolution
    cost: Cost
    same_loss: Cost | None
    money: Decimal | None
    lost: float | None = None
    marks: tuple[str, ...] = ()

    @property
    def offer(self) -> Offer | None:
        cost = self.same_loss or self.cost
        if cost.hours is None:
            return None
        money = None if self.money is None else float(self.money)
        return Offer(self.resolution.layout.shape.generation, cost.chips, cost.hours, money)


@dataclass(frozen=True)
class Comparison:
    """`times`: those of a step from which the hours follow. `prices`, `compiled`: what the user gave."""

    file: JobFile
    columns: tuple[Column, ...]
    times: Sequence[StepTime]
    prices: Prices | None
    compiled: CompiledSteps | None

    @property
    def title(self) -> str:
        return f"{self.file.job.name}: one recipe on {count(len(self.columns), 'slice')}"

    @property
    def rows(self) -> dict[str, list[str]]:
        """The rows of the table: each row's name, and its value for each slice."""
        resolutions = [column.resolution for column in self.columns]
        rows: dict[str, Sequence[object]] = {
            "topology": [r.layout.shape.topology for r in resolutions],
            "hosts": [r.layout.hosts for r in resolutions],
            "chips": [r.layout.chips for r in resolutions],
            "replicas": [r.layout.replicas for r in resolutions],
            "global batch": [r.recipe.batch.total for r in resolutions],
            "accumulation": [r.recipe.batch.accumulation for r in resolutions],
            "train steps": [r.recipe.steps for r in resolutions],
            "warm-up steps": [r.recipe.warmup_steps for r in resolutions],
            "learning rate": [r.recipe.learning_rate for r in resolutions],
            **cost_rows([column.cost for column in self.columns]),
            **self._rows_of_worth(),
            **(self.compiled.lines(resolutions) if self.compiled else {}),
        }
        return {name: [str(value) for value in values] for name, values in rows.items()}

    def _rows_of_worth(self) -> dict[str, list[str]]:
        same_loss = [column.same_loss for column in self.columns if column.same_loss is not None]
        rows = {"same-loss examples": [str(cost.steps * cost.batch) for cost in same_loss]} if same_loss else {}
        if all(column.offer is None for column in self.columns):
            return rows
        costs = cost_rows(same_loss)
        rows |= {f"same-loss {name}": costs[name] for name in ("hours", "chip-hours") if same_loss}
        if self.prices is not None:
            name = "same-loss cost" if same_loss else "cost"
            rows[name] = [self._money(column).get("money", "-") for column in self.columns]
        rows["chip-hours lost"] = ["-" if column.lost is None else f"{column.lost:.0%}" for column in self.columns]
        return rows | {"worth": [",\n".join(column.marks) or "-" for column in self.columns]}

    def notes(self) -> Iterator[str]:
        """Yields what the numbers rest on, and what they leave out."""
        yield from map(str, self.times)
        yield from unknown_times(self.times, [column.resolution.layout for column in self.columns])
        if not any(column.marks for column in self.columns):
            return
        if len({column.resolution.recipe.batch.total for column in self.columns}) > 1:
            if self.columns[0].same_loss is not None:
                yield "same-loss: by recipe.gradientNoiseScale, to the loss of the recipe as it was tuned"
            elif any(column.resolution.recipe.fewest_steps < column.cost.steps for column in self.columns):
                yield "the hours are the most that AdaScale may take; recipe.gradientNoiseScale says what to expect"
            else:
                yield (
                    "the hours are for the same examples; a larger batch needs more of them for the same loss, and"
                    " recipe.gradientNoiseScale says how many"
                )
        if self.prices is None and not any(CHEAPEST in column.marks for column in self.columns):
            yield "chip-hours of two generations cannot be compared; --prices says which slice is the cheapest"
        yield f"{LARGEST}: less than {MOST_LOST:.0%} of its chip-hours are lost against the smallest slice"

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "resolved": column.resolution.resolved.as_json(),
                "warnings": list(column.resolution.warnings),
                "cost": column.cost.as_json() | ({} if column.same_loss else self._money(column)),
                **({"sameLoss": column.same_loss.as_json() | self._money(column)} if column.same_loss else {}),
                **({} if column.lost is None else {"lostChipHours": column.lost, "worth": list(column.marks)}),
            }
            for column in self.columns
        ]

    def _money(self, column: Column) -> dict[str, str]:
        return {} if self.prices is None or column.money is None else {"money": self.prices.text(column.money)}

    def as_html(self) -> str:
        # Imported here, because jinja2 is needed for this alone.
        from tpu_training_operator.html_report.plot import Point
        from tpu_training_operator.html_report.slices import render_slices

        names = [str(column.resolution.layout) for column in self.columns]
        dots: dict[str, list[Point]] = {}
        for column in sorted(self.columns, key=lambda column: column.cost.chips):
            if (offer := column.offer) is not None:
                words = ": ".join(filter(None, (str(column.resolution.layout), ", ".join(column.marks))))
                dots.setdefault(offer.generation, []).append(Point(offer.chip_hours, offer.hours, words))
        title = f"Hours against chip-hours{', to the same loss' if self.columns[0].same_loss else ''}"
        return render_slices(self.title, names, self.rows, (title, dots), [*self.warnings(), *self.notes()])

    def warnings(self) -> list[str]:
        return [f"{column.resolution.layout}: {text}" for column in self.columns for text in column.resolution.warnings]


def compare_slices(
    file: JobFile,
    accelerator_types: str,
    times: Sequence[StepTime],
    prices: Prices | None = None,
    compiled: CompiledSteps | None = None,
) -> Comparison:
    """Moves the job to each accelerator type in the list. Raises BadInput with a problem for each that it cannot run
    on. Without a measured time, those count that are the best by the compile check."""
    slices = moved(file, accelerator_types.split(","), "--compare")
    times = times or (compiled.times(slices) if compiled else ())
    # A slice that the step does not fit would be no choice.
    refused = [on for on in slices if compiled and (result := compiled.of(on)) and result.fits is False]
    columns = [_column(file, on, () if on in refused else times, prices) for on in slices]
    offers = [offer for column in columns if (offer := column.offer) is not None]
    best = list(marks(offers))

    def judged(column: Column) -> Column:
        if (offer := column.offer) is None:
            return column
        return replace(column, lost=offer.lost(offers), marks=tuple(mark for other, mark in best if other == offer))

    return Comparison(file, tuple(map(judged, columns)), times, prices, compiled)


def _column(file: JobFile, resolution: Resolution, times: Sequence[StepTime], prices: Prices | None) -> Column:
    cost = cost_of(resolution, times)
    same_loss = to_same_loss(cost, file.job.spec.recipe)
    money = prices.money(str(resolution.layout), (same_loss or cost).chip_hours) if prices else None
    return Column(resolution, cost, same_loss, money)


def print_comparison(comparison: Comparison) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=comparison.title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in comparison.columns:
        table.add_column(str(column.resolution.layout), justify="right")
    for name, values in comparison.rows.items():
        table.add_row(name, *values)
    out = console(40 + 24 * len(comparison.columns))
    out.print(table)
    for warning in comparison.warnings():
        out.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)
    for note in comparison.notes():
        out.print(f"note: {escape(note)}", soft_wrap=True)
