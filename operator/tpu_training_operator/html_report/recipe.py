"""The recipe as it was resolved for the slice, row by row."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpu_training_operator.html_report.formatting import count, number, plural, share
from tpu_training_operator.html_report.history import RunSpec, Schedule

_NOT_FINITE = {"Skip": "such steps change nothing", "Warn": "the training continues"}


@dataclass(frozen=True)
class Row:
    """`value` stands out, `note` says where it comes from."""

    name: str
    value: str
    note: str = ""


def recipe_rows(spec: RunSpec) -> list[Row]:
    """The whole recipe; beside the table of `spec.scaling`, which has every number a rule may change, only the rest."""
    return [*(_unscaled(spec) if spec.scaling else _whole(spec)), *_surroundings(spec), Row("Seed", str(spec.seed))]


def _unscaled(spec: RunSpec) -> Iterator[Row]:
    optimizer = spec.optimizer
    yield Row("Schedule", spec.schedule.name, _after_warmup(spec.schedule))
    yield Row("Optimizer", optimizer.name, _values({"momentum": optimizer.momentum, "ε": optimizer.epsilon}))


def _whole(spec: RunSpec) -> Iterator[Row]:
    batch, steps, warmup, optimizer = spec.batch, spec.train_steps, spec.warmup_steps, spec.optimizer
    parts = [plural(spec.slice.replicas, "replica"), f"{count(batch.per_replica)} per replica"]
    if batch.accumulation > 1:
        parts.append(f"{count(batch.accumulation)} passes")
    yield Row("Global batch", plural(batch.total, "example"), " × ".join(parts))
    yield Row("Per-replica batch", plural(batch.per_replica, "example"), "at once in one device's memory")
    yield Row("Accumulation", plural(batch.accumulation, "pass", "passes"), "per step")
    yield Row("Train steps", count(steps), f"{count(steps * batch.total)} examples in all")
    yield Row("Warm-up", plural(warmup, "step"), f"{share(warmup / steps)} of the training" if warmup else "none")
    yield Row("Learning rate", number(optimizer.learning_rate), f"after warm-up; then {_schedule(spec.schedule)}")
    given = {
        "momentum": optimizer.momentum,
        "weight decay": optimizer.weight_decay,
        "β₁": optimizer.beta1,
        "β₂": optimizer.beta2,
        "ε": optimizer.epsilon,
    }
    yield Row("Optimizer", optimizer.name, _values(given))
    if spec.ema_decay is not None:
        yield Row("Average of weights", f"{spec.ema_decay:.10g}", "decay per step")
    if spec.gradient_clip_norm is not None:
        yield Row("Gradient clip norm", number(spec.gradient_clip_norm), "at most, over all parameters")
    if spec.precision is not None:
        yield Row("Precision", spec.precision)
    if spec.sharding is not None:
        yield Row("Sharding", spec.sharding, "each replica keeps its part of the optimizer's state")
    if spec.evaluate_every_steps is not None:
        yield Row("Evaluation", f"every {_interval(spec.evaluate_every_steps, 'step')}", "and at the end")
    if (stop := spec.stop_early) is not None:
        by = f", by more than {number(stop.min_delta)}" if stop.min_delta else ""
        evaluations = plural(stop.patience, "evaluation")
        yield Row("Early end", f"after {evaluations}", f"in a row without a better {stop.metric}{by}")
    if spec.on_not_finite in _NOT_FINITE:
        yield Row("Loss not finite", spec.on_not_finite, _NOT_FINITE[spec.on_not_finite])


def _surroundings(spec: RunSpec) -> Iterator[Row]:
    checkpoint = spec.checkpoint
    if checkpoint is not None:
        times = {"step": checkpoint.every_steps, **_clock(checkpoint.every_seconds)}
        due = " or ".join(_interval(every, unit) for unit, every in times.items() if every is not None)
        kept = f"the last {count(checkpoint.keep)} {'is' if checkpoint.keep == 1 else 'are'} kept"
        if checkpoint.keep_best is not None:
            kept += f", and the one with the best {checkpoint.keep_best.metric}"
        yield Row("Checkpoint", f"every {due}" if due else "when it ends", f"to {checkpoint.uri}, {kept}")
        if checkpoint.init_from is not None:
            yield Row("Initial weights", checkpoint.init_from.uri)
    if spec.data_uri is not None:
        yield Row("Data", spec.data_uri)


def _schedule(schedule: Schedule) -> str:
    match schedule.name:
        case "Constant":
            return "constant"
        case "Step":
            milestones = ", ".join(count(milestone) for milestone in schedule.milestones)
            return f"{_drop(schedule)} at {'step' if len(schedule.milestones) == 1 else 'steps'} {milestones}"
        case "Plateau":
            return _plateau(schedule)
        case _:
            return f"{schedule.name.lower()} {_end(schedule)}"


def _after_warmup(schedule: Schedule) -> str:
    """Without the milestones: they are scaled, so the other table has them."""
    match schedule.name:
        case "Constant":
            return "after warm-up"
        case "Step":
            return f"{_drop(schedule)} at every milestone"
        case "Plateau":
            return _plateau(schedule)
        case _:
            return f"{_end(schedule)} after warm-up"


def _plateau(schedule: Schedule) -> str:
    evaluations = plural(schedule.patience or 0, "evaluation")
    return f"{_drop(schedule)} after {evaluations} without a better {schedule.metric}"


def _drop(schedule: Schedule) -> str:
    return f"× {number(0.1 if schedule.factor is None else schedule.factor)}"


def _end(schedule: Schedule) -> str:
    return f"down to {number(schedule.factor)} of it" if schedule.factor else "down to 0"


def _values(given: Mapping[str, float | None]) -> str:
    # Not rounded: beta2 0.9995 and 0.9999 are different recipes.
    return ", ".join(f"{name} {value:.10g}" for name, value in given.items() if value is not None)


def _clock(seconds: int | None) -> dict[str, int]:
    """The interval in whole minutes, if it has only such, and else in seconds; by its unit."""
    if seconds is None:
        return {}
    return {"second": seconds} if seconds % 60 else {"minute": seconds // 60}


def _interval(every: int, unit: str) -> str:
    return unit if every == 1 else plural(every, unit)
