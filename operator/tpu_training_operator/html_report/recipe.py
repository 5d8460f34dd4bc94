"""The rows of the recipe, as resolved for the slice."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpu_training_operator.html_report.formatting import count, number, plural, share
from tpu_training_operator.html_report.history import RecordedRunSpec, RecordedSchedule

_NOT_FINITE = {"Skip": "such steps change nothing", "Warn": "the training continues"}


@dataclass(frozen=True)
class RecipeRow:
    """`value` is emphasised; `note` explains it."""

    name: str
    value: str
    note: str = ""


def recipe_rows(spec: RecordedRunSpec) -> list[RecipeRow]:
    """Returns the rows of the recipe, without numbers that the table of `spec.scaling` already shows."""
    return [
        *(_unscaled_rows(spec) if spec.scaling else _all_rows(spec)),
        *_surroundings(spec),
        RecipeRow("Seed", str(spec.seed)),
    ]


def _unscaled_rows(spec: RecordedRunSpec) -> Iterator[RecipeRow]:
    optimizer = spec.optimizer
    yield RecipeRow("Schedule", spec.schedule.name, _after_warmup(spec.schedule))
    yield RecipeRow("Optimizer", optimizer.name, _values({"momentum": optimizer.momentum, "ε": optimizer.epsilon}))


def _all_rows(spec: RecordedRunSpec) -> Iterator[RecipeRow]:
    batch, steps, warmup, optimizer = spec.batch, spec.train_steps, spec.warmup_steps, spec.optimizer
    parts = [plural(spec.slice.replicas, "replica"), f"{count(batch.per_replica)} per replica"]
    if batch.accumulation > 1:
        parts.append(f"{count(batch.accumulation)} passes")
    yield RecipeRow("Global batch", plural(batch.total, "example"), " × ".join(parts))
    yield RecipeRow("Per-replica batch", plural(batch.per_replica, "example"), "at once in one device's memory")
    yield RecipeRow("Accumulation", plural(batch.accumulation, "pass", "passes"), "per step")
    yield RecipeRow("Train steps", count(steps), f"{count(steps * batch.total)} examples in all")
    yield RecipeRow("Warm-up", plural(warmup, "step"), f"{share(warmup / steps)} of the training" if warmup else "none")
    yield RecipeRow("Learning rate", number(optimizer.learning_rate), f"after warm-up; then {_schedule(spec.schedule)}")
    numbers = {
        "momentum": optimizer.momentum,
        "weight decay": optimizer.weight_decay,
        "β₁": optimizer.beta1,
        "β₂": optimizer.beta2,
        "ε": optimizer.epsilon,
    }
    yield RecipeRow("Optimizer", optimizer.name, _values(numbers))
    if spec.ema_decay is not None:
        yield RecipeRow("Average of weights", f"{spec.ema_decay:.10g}", "decay per step")
    if spec.gradient_clip_norm is not None:
        yield RecipeRow("Gradient clip norm", number(spec.gradient_clip_norm), "at most, over all parameters")
    if spec.precision is not None:
        yield RecipeRow("Precision", spec.precision)
    if spec.sharding is not None:
        yield RecipeRow("Sharding", spec.sharding, "each replica keeps its part of the optimizer's state")
    if spec.evaluate_every_steps is not None:
        yield RecipeRow("Evaluation", f"every {_interval(spec.evaluate_every_steps, 'step')}", "and at the end")
    if (stop := spec.stop_early) is not None:
        by = f", by more than {number(stop.min_delta)}" if stop.min_delta else ""
        evaluations = plural(stop.patience, "evaluation")
        yield RecipeRow("Early end", f"after {evaluations}", f"in a row without a better {stop.metric}{by}")
    if spec.on_not_finite in _NOT_FINITE:
        yield RecipeRow("Loss not finite", spec.on_not_finite, _NOT_FINITE[spec.on_not_finite])


def _surroundings(spec: RecordedRunSpec) -> Iterator[RecipeRow]:
    checkpoint = spec.checkpoint
    if checkpoint is not None:
        times = {"step": checkpoint.every_steps, **_clock(checkpoint.every_seconds)}
        due = " or ".join(_interval(every, unit) for unit, every in times.items() if every is not None)
        kept = f"the last {count(checkpoint.keep)} {'is' if checkpoint.keep == 1 else 'are'} kept"
        if checkpoint.keep_best is not None:
            kept += f", and the one with the best {checkpoint.keep_best.metric}"
        yield RecipeRow("Checkpoint", f"every {due}" if due else "when it ends", f"to {checkpoint.uri}, {kept}")
        if checkpoint.init_from is not None:
            yield RecipeRow("Initial weights", checkpoint.init_from.uri)
    if spec.data_uri is not None:
        yield RecipeRow("Data", spec.data_uri)


def _schedule(schedule: RecordedSchedule) -> str:
    match schedule.name:
        case "Constant":
            return "constant"
        case "Step":
            milestones = ", ".join(count(milestone) for milestone in schedule.milestones)
            return f"{_factor_text(schedule)} at {'step' if len(schedule.milestones) == 1 else 'steps'} {milestones}"
        case "Plateau":
            return _plateau(schedule)
        case _:
            return f"{schedule.name.lower()} {_end(schedule)}"


def _after_warmup(schedule: RecordedSchedule) -> str:
    """Describes the schedule without milestones: they are scaled, so the other table has them."""
    match schedule.name:
        case "Constant":
            return "after warm-up"
        case "Step":
            return f"{_factor_text(schedule)} at every milestone"
        case "Plateau":
            return _plateau(schedule)
        case _:
            return f"{_end(schedule)} after warm-up"


def _plateau(schedule: RecordedSchedule) -> str:
    evaluations = plural(schedule.patience or 0, "evaluation")
    return f"{_factor_text(schedule)} after {evaluations} without a better {schedule.metric}"


def _factor_text(schedule: RecordedSchedule) -> str:
    return f"× {number(0.1 if schedule.factor is None else schedule.factor)}"


def _end(schedule: RecordedSchedule) -> str:
    return f"down to {number(schedule.factor)} of it" if schedule.factor else "down to 0"


def _values(numbers: Mapping[str, float | None]) -> str:
    # Not rounded: beta2 0.9995 and 0.9999 are different recipes.
    return ", ".join(f"{name} {value:.10g}" for name, value in numbers.items() if value is not None)


def _clock(seconds: int | None) -> dict[str, int]:
    """Returns the interval by its unit: in minutes if it is a whole number of them, and else in seconds."""
    if seconds is None:
        return {}
    return {"second": seconds} if seconds % 60 else {"minute": seconds // 60}


def _interval(every: int, unit: str) -> str:
    return unit if every == 1 else plural(every, unit)
