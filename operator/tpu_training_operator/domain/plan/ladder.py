"""Climbing a ladder: what follows when all workers of a rung have succeeded.

The verdict and the attempt on the next rung are one status write. If the operator is killed before that write, the next
pass judges the same pods again; after it, the next pass goes on from the verdict. So no verdict is given twice, and no
rung is skipped. A failure within a rung is like any other: `restart` decides, and the next attempt is on the same rung.
"""

from dataclasses import replace

from tpu_training_operator.api.conditions import EventReason, Reason
from tpu_training_operator.api.ladder import Begin
from tpu_training_operator.api.status import (
    LONGEST_TEXT,
    MOST_GATES,
    Goodput,
    PlacementReason,
    Stage,
    Status,
    Verdict,
)
from tpu_training_operator.api.words import number_text
from tpu_training_operator.domain.job.rung_gates import Found, Measurement, Pace, judge
from tpu_training_operator.domain.job.rungs import Rung, rung_of
from tpu_training_operator.domain.plan.common.attempt import Why, begin_attempt
from tpu_training_operator.domain.plan.common.completion import fail, final_progress
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.goodput import lost, saved
from tpu_training_operator.domain.plan.common.restart_budget import refill
from tpu_training_operator.domain.plan.common.rung_status import on_rung, pace_of, three_digits
from tpu_training_operator.domain.plan.plan import Plan


def climb(ctx: Context) -> Plan:
    """All workers of a trial have succeeded: the next rung, or the end of the job."""
    rung, trial = ctx.rung, ctx.resolution.trial
    assert rung is not None
    assert trial is not None
    measured = Measurement.read(ctx.pods[0].trainer_message)
    pace = Pace(measured.examples_per_second, ctx.resolution.layout.chips)
    before = pace_of(ctx.status.stages[: rung.number - 1])
    found = judge(trial.gates, ctx.resolution.steps, measured, pace, before)
    passes = all(gate.passes for gate in found)
    status = on_rung(ctx.status, rung)
    stage = replace(
        status.stages[-1],
        verdict=Verdict.PASSED if passes else Verdict.FAILED,
        attempt=ctx.attempt,
        steps=status.stages[-1].steps if measured.steps is None else measured.steps,
        examples_per_second=number_text(measured.examples_per_second),
        efficiency=three_digits(pace.efficiency(before)),
        first_loss=number_text(measured.first_loss),
        last_loss=number_text(measured.last_loss),
        gates=[_fitting(gate) for gate in found][:MOST_GATES],
    )
    status = replace(status, stages=[*status.stages[:-1], stage], goodput=_after(ctx, passes))
    if not passes:
        failed = "; ".join(str(gate) for gate in found if not gate.passes)
        progress = final_progress(ctx.pods[0], ctx.resolution.steps, ctx.status.progress)
        status = replace(status, progress=progress or status.progress)
        return fail(ctx, status, Reason.GATE_FAILED, f"{rung.words} on {stage.slice}: {failed}")
    return _next_rung(ctx, status, rung, stage)


def _next_rung(ctx: Context, status: Status, rung: Rung, stage: Stage) -> Plan:
    above = rung_of(ctx.options, ctx.trials, status.stages)
    assert above is not None
    speed = f" at {stage.examples_per_second} examples/s" if stage.examples_per_second else ""
    efficiency = f", efficiency {stage.efficiency}" if stage.efficiency else ""
    to = "the job itself" if above.trial is None else above.words
    message = (
        f"{rung.words} passed on {stage.slice} ({stage.steps} steps of {stage.global_batch_size} examples"
        f"{speed}{efficiency}); attempt {ctx.next_attempt} is {to} on {above.option}"
    )
    # Faults on this rung are no reason to allow fewer restarts on the next, whose steps are counted from 0 again.
    status = replace(status, restarts=refill(status.restarts), progress=None)
    why = Why(Reason.NEXT_RUNG, EventReason.NEXT_RUNG, message)
    return begin_attempt(ctx, above.option, why, status, placed=PlacementReason.RUNG)


def _after(ctx: Context, passes: bool) -> Goodput:
    """What a trial has trained counts as saved only if the job continues it."""
    scale_up = ctx.job.spec.scale_up
    assert scale_up is not None
    assert ctx.rung is not None
    goodput = ctx.goodput_at_end(ctx.now)
    kept = passes and scale_up.begin is Begin.CHECKPOINT and ctx.rung.number == ctx.rung.of - 1
    return saved(goodput) if kept else lost(goodput)


def _fitting(gate: Found) -> str:
    return str(gate)[:LONGEST_TEXT]
