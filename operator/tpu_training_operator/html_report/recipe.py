"""The rows of the recipe, as resolved for the slice."""

from collections.abc import Iterator

from tpu_training_operator.html_report.formatting import count, number, plural, share
from tpu_training_operator.html_report.history import History

_NOT_FINITE = {"Skip": "such steps change nothing", "Warn": "the training continues"}


def recipe_rows(history: History) -> list[tuple[str, str, str]]:
    """Returns the rows of the recipe: name, value and explanation, without the numbers that the table of scaled numbers
    already shows."""
    return [*(_unscaled_rows(history) if history.scaling else _all_rows(history)), *_other_rows(history)]


def _unscaled_rows(history: History) -> Iterator[tuple[str, str, str]]:
    # Milestones are scaled, so the other table has them.
    factor = _factor(history)
    explained = {"Constant": "after warm-up", "Step": f"{factor} at every milestone", "Plateau": _schedule(history)}
    yield "Schedule", history.schedule, explained.get(history.schedule, f"{_lowest(history)} after warm-up")
    yield "Optimizer", history.optimizer, _values(momentum=history.momentum, ε=history.epsilon)


def _all_rows(history: History) -> Iterator[tuple[str, str, str]]:
    batch, steps, warmup, accumulation = (
        history.global_batch,
        history.train_steps,
        history.warmup_steps,
        history.accumulation,
    )
    per_replica = plural(history.per_replica_batch, "example")
    parts = [plural(history.replicas, "replica"), f"{count(history.per_replica_batch)} per replica"]
    parts += [f"{count(accumulation)} passes"] if accumulation > 1 else []
    yield "Global batch", plural(batch, "example"), " × ".join(parts)
    yield "Per-replica batch", per_replica, "at once in one device's memory"
    yield "Accumulation", plural(accumulation, "pass", "passes"), "per step"
    yield "Train steps", count(steps), f"{count(steps * batch)} examples in all"
    yield "Warm-up", plural(warmup, "step"), f"{share(warmup / steps)} of the training" if warmup else "none"
    yield "Learning rate", number(history.learning_rate), f"after warm-up; then {_schedule(history)}"
    numbers = {"momentum": history.momentum, "weight decay": history.weight_decay}
    betas = {"β₁": history.beta1, "β₂": history.beta2, "ε": history.epsilon}
    yield "Optimizer", history.optimizer, _values(**numbers, **betas)
    if history.ema_decay is not None:
        yield "Average of weights", f"{history.ema_decay:.10g}", "decay per step"
    if history.clip_norm is not None:
        yield "Gradient clip norm", number(history.clip_norm), "at most, over all parameters"
    if history.precision is not None:
        yield "Precision", history.precision, ""
    if history.sharding is not None:
        yield "Sharding", history.sharding, "each replica keeps its part of the optimizer's state"
    if history.evaluate_every is not None:
        yield "Evaluation", f"every {_interval(history.evaluate_every, 'step')}", "and at the end"
    if (stop := history.stop_early) is not None:
        by = f", by more than {number(stop.min_delta)}" if stop.min_delta else ""
        waits = f"after {plural(stop.patience, 'evaluation')}"
        yield "Early end", waits, f"in a row without a better {stop.metric}{by}"
    if history.on_not_finite in _NOT_FINITE:
        yield "Loss not finite", history.on_not_finite, _NOT_FINITE[history.on_not_finite]


def _other_rows(history: History) -> Iterator[tuple[str, str, str]]:
    if history.checkpoint_uri is not None:
        seconds = history.save_every_seconds
        times = [(history.save_every_steps, "step")]
        times.append((seconds, "second") if seconds is None or seconds % 60 else (seconds // 60, "minute"))
        due = " or ".join(_interval(every, unit) for every, unit in times if every is not None)
        kept = f"the last {count(history.keep)} {'is' if history.keep == 1 else 'are'} kept"
        kept += f", and the one with the best {history.keep_best.metric}" if history.keep_best else ""
        yield "Checkpoint", f"every {due}" if due else "when it ends", f"to {history.checkpoint_uri}, {kept}"
    if history.init_from is not None:
        yield "Initial weights", history.init_from, ""
    if history.data_uri is not None:
        yield "Data", history.data_uri, ""
    yield "Seed", str(history.seed), ""


def _schedule(history: History) -> str:
    match history.schedule:
        case "Constant":
            return "constant"
        case "Step":
            milestones = ", ".join(map(count, history.milestones))
            return f"{_factor(history)} at {'step' if len(history.milestones) == 1 else 'steps'} {milestones}"
        case "Plateau":
            waits = plural(history.plateau_patience or 0, "evaluation")
            return f"{_factor(history)} after {waits} without a better {history.plateau_metric}"
        case name:
            return f"{name.lower()} {_lowest(history)}"


def _factor(history: History) -> str:
    return f"× {number(0.1 if history.factor is None else history.factor)}"


def _lowest(history: History) -> str:
    return f"down to {number(history.factor)} of it" if history.factor else "down to 0"


def _values(**numbers: float | None) -> str:
    # Not rounded: beta2 0.9995 and 0.9999 are different recipes.
    return ", ".join(f"{name} {value:.10g}" for name, value in numbers.items() if value is not None)


def _interval(every: int, unit: str) -> str:
    return unit if every == 1 else plural(every, unit)
