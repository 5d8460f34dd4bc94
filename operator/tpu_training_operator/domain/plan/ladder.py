"""The ladder: what follows when all workers of a rung have succeeded.

The verdict and the attempt on the next rung are one status write. If the operator is killed before that write, the next
pass judges the same pods again; after it, the next pass goes on from the verdict. So no verdict is given twice, and no
rung is skipped. A failure within a rung is like any other: `restart` decides, and the next attempt is on the same rung.
"""

from tpu_training_operator.api.conditions import EventReason, Reason
from tpu_training_operator.api.ladder import Begin, Gates
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.status import (
    LONGEST_TEXT,
    MOST_GATES,
    Goodput,
    PlacementReason,
    RungStatus,
    RungVerdict,
    Status,
)
from tpu_training_operator.api.words import count, number_text
from tpu_training_operator.domain.job.rung_gates import Pace, judge
from tpu_training_operator.domain.job.rung_losses import compare, loss_points
from tpu_training_operator.domain.job.rungs import Rung, rung_of, trusted_noise_scale
from tpu_training_operator.domain.job.trainer_report import LastWords
from tpu_training_operator.domain.objects.actions import AT_ONCE, Event
from tpu_training_operator.domain.plan.common.accounts import mark_lost, mark_saved
from tpu_training_operator.domain.plan.common.attempt import Why, begin_attempt
from tpu_training_operator.domain.plan.common.completion import fail, read_final_progress
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.restart_limits import refill
from tpu_training_operator.domain.plan.common.rung_status import format_ratio, read_pace, record_rung, with_verdict
from tpu_training_operator.domain.plan.parse_cache import read_job, without_entry_check
from tpu_training_operator.domain.plan.plan import Plan


def finish_rung(ctx: Context) -> Plan:
    """Plans what follows when all workers of a lower rung have succeeded: the next rung, or the end of the job."""
    rung, lower_rung = ctx.rung, ctx.resolution.lower_rung
    assert rung is not None
    assert lower_rung is not None
    measured = ctx.pods[0].trainer_message or LastWords()
    status = record_rung(ctx.status, rung)
    made = status.rungs[-1].steps if measured.step is None else measured.step
    ended = replace(_judge(ctx, rung, lower_rung.gates, measured, ctx.resolution.steps), steps=made)
    passes = ended.verdict is RungVerdict.PASSED
    status = replace(with_verdict(status, ended), goodput=_settle_rung(ctx, passes))
    if not passes:
        progress = read_final_progress(ctx.pods[0], ctx.resolution.steps, ctx.status.progress)
        status = replace(status, progress=progress or status.progress)
        return fail(ctx, status, Reason.GATE_FAILED, f"{rung.words} on {ended.slice}: {_failures(ended)}")
    return _next_rung(ctx, status, rung, ended)


def judge_first_steps(ctx: Context) -> Plan | None:
    """Plans the verdict on the first steps of the job itself, the top rung, which goes on meanwhile; None until its
    trainer has measured them, once they are judged, and if nothing is left to train."""
    rung, judged, report = ctx.rung, ctx.resolution.judged, ctx.observed.report
    if rung is None or judged is None or ctx.is_suspended or len(ctx.status.rungs) != rung.of:
        return None
    measured = report.rung if report is not None and report.attempt == ctx.attempt else None
    if measured is None and ctx.pods and ctx.pods[0].trainer_message is not None:
        # The job is so short, or its reports were lost.
        measured = ctx.pods[0].trainer_message.rung
    if ctx.status.rungs[-1].verdict is not RungVerdict.RUNNING or measured is None or not measured.steps:
        return None
    words = LastWords(step=measured.steps, examples_per_second=measured.examples_per_second, rung=measured)
    # No rung is above it: its noise scale would change the job's own learning rate in the middle of the training.
    ended = replace(_judge(ctx, rung, judged.gates, words, measured.steps), noise_scale=None)
    first = f"{rung.words} on {ended.slice}, the job's {count(measured.steps, 'step')} after step {measured.begins}"
    if ended.verdict is not RungVerdict.PASSED:
        status = with_verdict(ctx.status, replace(ended, steps=measured.steps))
        status = replace(status, goodput=ctx.goodput_at_end(ctx.now))
        return fail(ctx, status, Reason.GATE_FAILED, f"{first}: {_failures(ended)}")
    status = with_verdict(ctx.status, ended)
    return Plan(status=status, events=(Event(EventReason.RUNG_PASSED, f"{first}: passed"),), again=AT_ONCE)


def _judge(ctx: Context, rung: Rung, gates: Gates, measured: LastWords, steps: int) -> RungStatus:
    """Returns the rung with its verdict. `steps`: those that it should make."""
    below, batch = ctx.status.rungs[: rung.number - 1], ctx.resolution.recipe.batch.total
    pace, before = Pace(measured.rate, ctx.resolution.layout.chips), read_pace(below)
    losses = loss_points(measured.rung.curve, batch)
    difference = compare(losses, below[-1].losses) if below else None
    results = judge(gates, steps, measured, pace, before, difference)
    passes = all(gate.passed for gate in results)
    return replace(
        record_rung(ctx.status, rung).rungs[-1],
        verdict=RungVerdict.PASSED if passes else RungVerdict.FAILED,
        attempt=ctx.attempt,
        examples_per_second=number_text(measured.rate),
        efficiency=format_ratio(pace.efficiency(before)),
        first_loss=number_text(measured.rung.first_loss),
        last_loss=number_text(measured.rung.last_loss),
        utilisation=format_ratio(measured.rung.utilisation),
        noise_scale=trusted_noise_scale(measured.rung.noise_scale, measured.step or 0),
        losses=losses,
        gates=[replace(gate, message=gate.message[:LONGEST_TEXT]) for gate in results][:MOST_GATES],
    )


def _failures(ended: RungStatus) -> str:
    return "; ".join(str(gate) for gate in ended.gates if not gate.passed)


def _next_rung(ctx: Context, status: Status, rung: Rung, ended: RungStatus) -> Plan:
    # With the noise scale of this rung.
    options, lower_rungs = read_job(without_entry_check(ctx.observed.job), status.rungs)
    ctx = replace(ctx, options=options, lower_rungs=lower_rungs)
    above = rung_of(options, lower_rungs, status.rungs)
    assert above is not None
    speed = f" at {ended.examples_per_second} examples/s" if ended.examples_per_second else ""
    efficiency = f", efficiency {ended.efficiency}" if ended.efficiency else ""
    to = "the job itself" if above.lower_rung is None else above.words
    message = (
        f"{rung.words} passed on {ended.slice} ({ended.steps} steps of {ended.global_batch_size} examples"
        f"{speed}{efficiency}); attempt {ctx.next_attempt} is {to} on {above.option}"
    )
    # Failures on this rung must not leave the next one fewer restarts, and its steps are counted from 0 again.
    status = replace(status, restarts=refill(status.restarts), progress=None)
    why = Why(Reason.NEXT_RUNG, EventReason.NEXT_RUNG, message)
    return begin_attempt(ctx, above.option, why, status, placed=PlacementReason.RUNG)


def _settle_rung(ctx: Context, passes: bool) -> Goodput:
    """Returns the goodput after a lower rung. Its training counts as saved only if the job itself continues from it."""
    ladder = ctx.job.spec.ladder
    assert ladder is not None
    assert ctx.rung is not None
    goodput = ctx.goodput_at_end(ctx.now)
    is_saved = passes and ladder.begin is Begin.CHECKPOINT and ctx.rung.number == ctx.rung.of - 1
    return mark_saved(goodput) if is_saved else mark_lost(goodput)
