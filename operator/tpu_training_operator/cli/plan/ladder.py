"""Shows a job's ladder as text: the cost of every rung, and how far the job has climbed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_training_operator.api.decimals import readable
from tpu_training_operator.api.ladder import Begin
from tpu_training_operator.api.status import RungStatus, RungVerdict
from tpu_training_operator.api.words import count
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.job.recipe.cost import Cost, StepTime, cost_of, cost_rows
from tpu_training_operator.domain.job.rungs import with_judged_steps


@dataclass(frozen=True)
class PlannedRung:
    """A rung before it runs. `cost`: of its steps alone, without start, compilation and evaluation."""

    number: int
    option: SliceOption
    cost: Cost

    @property
    def gates(self) -> list[str]:
        """The gates, named as in the spec, with what they require."""
        trial = self.option.resolution.lower_rung or self.option.resolution.judged
        if trial is None:
            return []
        return list(_gate_lines(trial.gates.model_dump(by_alias=True, exclude_none=True, mode="json")))

    def as_json(self) -> dict[str, Any]:
        resolution = self.option.resolution
        return {
            "rung": self.number,
            "slice": str(self.option),
            "chips": resolution.layout.chips,
            "globalBatchSize": resolution.recipe.batch.total,
            "learningRate": resolution.recipe.learning_rate,
            "steps": resolution.steps,
            "gates": self.gates,
            "cost": self.cost.as_json(),
        }


def planned_rungs(file: JobFile, times: Sequence[StepTime]) -> list[PlannedRung]:
    """Returns all rungs, the job itself last; an empty list for a job without a ladder."""
    if not file.lower_rungs:
        return []
    top = with_judged_steps(file.options[0], file.lower_rungs[-1], file.options[0])
    options = enumerate((*file.lower_rungs, top), 1)
    return [PlannedRung(number, option, cost_of(option.resolution, times)) for number, option in options]


def budget_warnings(file: JobFile, cost: Cost, rungs: Sequence[PlannedRung]) -> Iterator[str]:
    """Yields a warning if the training needs more chip-hours than the budget has. The rungs below it count, too."""
    budget, lower = file.job.spec.run_policy.budget, rungs[:-1]
    if budget is None or cost.chip_hours is None:
        return
    if lower and (ladder := file.job.spec.ladder) and ladder.begin is Begin.CHECKPOINT:
        last, batch = lower[-1].option.resolution, file.resolution.recipe.batch.total
        cost = replace(cost, steps=cost.steps - last.steps * last.recipe.batch.total // batch)
    chip_hours, trials = cost.chip_hours or 0.0, sum(rung.cost.chip_hours or 0.0 for rung in lower)
    if chip_hours + trials > budget.chip_hours:
        below = f" and the rungs below it {trials:.3g}" if lower else ""
        total = f"the training takes {chip_hours:.3g} chip-hours{below}"
        yield f"{total}, and spec.runPolicy.budget.chipHours is {budget.chip_hours}"


def print_ladder(rungs: Sequence[PlannedRung], from_scratch: bool, width: int) -> None:
    """Prints the rungs as a table; prints nothing if there are none."""
    if not rungs:
        return
    from rich.markup import escape
    from rich.table import Table

    from tpu_training_operator.cli.common.terminal import console

    table = Table(title=f"ladder: {count(len(rungs), 'rung')}", title_justify="left", title_style="bold")
    costs = cost_rows([rung.cost for rung in rungs])
    for name in ("rung", "slice", "chips", "batch", "learning rate", "steps", *costs):
        table.add_column(name, justify="left" if name == "slice" else "right")
    table.add_column("gates", overflow="fold")
    for rung, *cost in zip(rungs, *costs.values(), strict=True):
        resolution = rung.option.resolution
        numbers = (resolution.layout.chips, resolution.recipe.batch.total, resolution.recipe.learning_rate)
        gates = ", ".join(rung.gates)
        if resolution.lower_rung is None:
            first = f"; its first {count(resolution.judged.steps, 'step')}: {gates}" if resolution.judged else ""
            gates = f"the job itself{first}"
        cells = (rung.number, rung.option, *numbers, resolution.steps, *cost)
        table.add_row(*map(str, cells), escape(gates or "none"))
    out = console(width)
    out.print(table)
    *lower, job = [rung.cost.chip_steps for rung in rungs]
    begins = "begins at step 0" if from_scratch else "continues the rung before it"
    out.print(
        f"note: the lower rungs make {sum(lower)} chip-steps, {sum(lower) / job:.3g} times the job's {job}; the job"
        f" then {begins}",
        soft_wrap=True,
    )


def rung_lines(rungs: Sequence[RungStatus]) -> Iterator[str]:
    """Yields a line for every rung so far, followed by the results of its gates if it has failed."""
    for number, rung in enumerate(rungs, 1):
        facts = [
            f"{rung.steps} steps of {rung.global_batch_size}",
            f"learning rate {readable(rung.learning_rate)}",
            f"{rung.examples_per_second} examples/s" if rung.examples_per_second else "",
            f"efficiency {rung.efficiency}" if rung.efficiency else "",
            f"noise scale {rung.noise_scale}" if rung.noise_scale else "",
            f"loss {rung.first_loss} to {rung.last_loss}" if rung.first_loss and rung.last_loss else "",
        ]
        summary = ", ".join(fact for fact in facts if fact)
        yield f"{number} {rung.slice}: {rung.verdict.lower()}; {summary}"
        if rung.verdict is RungVerdict.FAILED:
            yield from (f"  {gate}" for gate in rung.gates)


def _gate_lines(gates: dict[str, Any]) -> Iterator[str]:
    for gate, value in gates.items():
        match value:
            case True:
                yield gate
            case str():
                yield f"{gate} {value}"
            case list():
                yield f"{gate} {', '.join(value)}"
            case {"tolerance": tolerance}:
                yield f"{gate} within {tolerance}"
            case {"metric": metric}:
                bounds = " ".join(f"{name} {value[name]}" for name in ("min", "max") if name in value)
                yield f"{gate} {metric} {bounds}"
