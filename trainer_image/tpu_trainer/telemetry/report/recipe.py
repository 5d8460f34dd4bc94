"""The recipe as it was resolved for the slice, row by row. Used by `page`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tpu_trainer.spec import OptimizerSpec, RunSpec
from tpu_trainer.telemetry.report.words import count, number, plural, share


@dataclass(frozen=True)
class Row:
    """`value` stands out, `note` says where it comes from."""

    name: str
    value: str
    note: str = ""


def recipe_rows(spec: RunSpec) -> list[Row]:
    batch, steps, warmup = spec.batch, spec.train_steps, spec.warmup_steps
    parts = [plural(spec.slice.replicas, "replica"), f"{count(batch.per_replica)} per replica"]
    if batch.accumulation > 1:
        parts.append(f"{count(batch.accumulation)} passes")
    return [
        Row("Global batch", plural(batch.total, "example"), " × ".join(parts)),
        Row("Per-replica batch", plural(batch.per_replica, "example"), "at once in one device's memory"),
        Row("Accumulation", plural(batch.accumulation, "pass", "passes"), "per step"),
        Row("Train steps", count(steps), f"{count(steps * batch.total)} examples in all"),
        Row("Warm-up", plural(warmup, "step"), f"{share(warmup / steps)} of the training" if warmup else "none"),
        Row("Learning rate", number(spec.optimizer.learning_rate), f"after warm-up; then {_schedule(spec)}"),
        Row("Optimizer", spec.optimizer.name, ", ".join(_optimizer(spec.optimizer))),
        *_optional(spec),
        Row("Seed", str(spec.seed)),
    ]


def _schedule(spec: RunSpec) -> str:
    schedule = spec.schedule
    match schedule.name:
        case "Constant":
            return "constant"
        case "Step":
            milestones = ", ".join(count(milestone) for milestone in schedule.milestones)
            steps = "step" if len(schedule.milestones) == 1 else "steps"
            return f"× {number(0.1 if schedule.factor is None else schedule.factor)} at {steps} {milestones}"
        case _:
            part = f"{number(schedule.factor)} of it" if schedule.factor else "0"
            return f"{schedule.name.lower()} down to {part}"


def _optimizer(optimizer: OptimizerSpec) -> list[str]:
    given = {
        "momentum": optimizer.momentum,
        "weight decay": optimizer.weight_decay,
        "β₁": optimizer.beta1,
        "β₂": optimizer.beta2,
        "ε": optimizer.epsilon,
    }
    # Not rounded: beta2 0.9995 and 0.9999 are different recipes.
    return [f"{name} {value:.10g}" for name, value in given.items() if value is not None]


def _optional(spec: RunSpec) -> Iterator[Row]:
    if spec.ema_decay is not None:
        yield Row("Average of weights", f"{spec.ema_decay:.10g}", "decay per step")
    if spec.evaluate_every_steps is not None:
        yield Row("Evaluation", f"every {_amount(spec.evaluate_every_steps, 'step')}", "and at the end")
    checkpoint = spec.checkpoint
    if checkpoint is not None:
        times = {"step": checkpoint.every_steps, "minute": checkpoint.every_minutes}
        due = " or ".join(_amount(every, unit) for unit, every in times.items() if every is not None)
        kept = f"the last {count(checkpoint.keep)} {'is' if checkpoint.keep == 1 else 'are'} kept"
        yield Row("Checkpoint", f"every {due}" if due else "when it ends", f"to {checkpoint.uri}, {kept}")
    if spec.data_uri is not None:
        yield Row("Data", spec.data_uri)


def _amount(every: int, unit: str) -> str:
    return unit if every == 1 else plural(every, unit)
