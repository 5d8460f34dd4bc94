"""The planner: what to do next about one job.

The attempt protocol. An attempt exists once `status.attempt` says so. The number is raised in a pass that does nothing
else, with the job's resourceVersion as precondition. Later passes converge the pods to it: workers of other attempts
are deleted, and once they or their nodes are gone, the attempt's own workers are created. After a crash between any two
effects the next pass continues, and of two operators only one can raise the number (`start` says what follows if the
number is lost).

`_decide` finds the one case that a job is in. Placeholders and Kueue then add what they need beside it (`_contribute`),
and the status gets what time alone has changed (`_complete`).
"""

from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import Reason
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.replace import replace
from tpu_training_operator.api.run_policy import ChipBudget
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.domain.cluster_state.observed import Observed
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.failures.pod_signs import has_succeeded
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.job.rungs import rung_of
from tpu_training_operator.domain.objects.actions import AT_ONCE
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy
from tpu_training_operator.domain.plan.checks.entry_check import check_entry
from tpu_training_operator.domain.plan.common.accounts import active_seconds, charge_slice
from tpu_training_operator.domain.plan.common.completion import describe_deadline, fail, succeed
from tpu_training_operator.domain.plan.common.conditions import JobState
from tpu_training_operator.domain.plan.common.context import Context
from tpu_training_operator.domain.plan.common.pod_cleanup import look_again
from tpu_training_operator.domain.plan.common.progress import apply_report, write_due
from tpu_training_operator.domain.plan.common.slice_record import choose_option, complete_move, is_wrong, keep_record
from tpu_training_operator.domain.plan.common.starts import complete_start
from tpu_training_operator.domain.plan.delegation import plan_delegated
from tpu_training_operator.domain.plan.gang import keep_alive
from tpu_training_operator.domain.plan.invalid import plan_invalid, read_budget
from tpu_training_operator.domain.plan.ladder import finish_rung, judge_first_steps
from tpu_training_operator.domain.plan.parse_cache import read_job, read_status, without_entry_check
from tpu_training_operator.domain.plan.placement.return_to_preferred import hold_nodes, move_once_held
from tpu_training_operator.domain.plan.plan import Plan, Turn
from tpu_training_operator.domain.plan.queue.queueing import (
    LOOK_AT_RUNNING,
    ask_for_better_slice,
    end_workloads,
    look_at_suspended,
    move_once_admitted,
    tell_pods_ready,
    wait_for_admission,
)
from tpu_training_operator.domain.plan.start import find_unknown_workers, recover_status, start
from tpu_training_operator.domain.plan.startable import check_options
from tpu_training_operator.domain.plan.stopping import budget
from tpu_training_operator.domain.plan.stopping.departure import delete_when_due, leave, stop_remaining_pods
from tpu_training_operator.domain.plan.stopping.suspension import BY_USER, suspend


def plan(
    observed: Observed,
    now: datetime,
    reporting: Reporting | None = None,
    *,
    network_policy: WorkerNetworkPolicy | None = None,
    max_hosts: int = MAX_HOSTS,
    package_index: bool = True,
) -> Plan:
    """Plans the next actions and the status to write. The same arguments give the same plan.

    `reporting`: where the workers report to; None if no operator listens. `network_policy`: what keeps other pods from
    the workers; None if nothing should. `max_hosts`: a larger job is not started; one that has started under another
    bound continues. `package_index`: whether workers may install packages from an index.
    """
    look = JobState(observed, read_status(observed.job.get("status")), now)
    if (elsewhere := plan_delegated(look, max_hosts)) is not None:
        return elsewhere
    if look.is_leaving:
        return _complete(leave(look), look, look.status)
    if look.has_finished:
        return delete_when_due(look) or _complete(
            stop_remaining_pods(look).then(end_workloads(look)), look, look.status
        )
    try:
        ctx = _read(look, max_hosts)
    except InvalidJob as error:
        return _plan_without_spec(look, error)
    ctx = replace(ctx, reporting=reporting, network_policy=network_policy, package_index=package_index)
    if workers := find_unknown_workers(ctx):
        return recover_status(ctx, workers)
    limit = ctx.job.spec.run_policy.budget
    return _complete(_contribute(ctx, _decide(ctx)), ctx, look.status, limit, ctx.option)


def _read(look: JobState, max_hosts: int) -> Context:
    """Reads the spec, and applies what the workers have reported to the status. Raises InvalidJob."""
    observed, status = look.observed, look.status
    has_begun = status.attempt > 0 or bool(observed.pods)
    options, lower = read_job(without_entry_check(observed.job) if has_begun else observed.job, status.rungs)
    observed = observed.within([option.layout for option in (*options, *lower)])
    if not has_begun or look.is_suspended:
        # A change made during a suspension can keep the next attempt from starting, as it would the first one.
        check_options((*options, *lower), observed.job, MAX_HOSTS if has_begun else max_hosts)
    rung = rung_of(options, lower, status.rungs)
    option = choose_option(rung.options if rung else options, status, observed.pods)
    if rung is not None:
        rung = replace(rung, option=option)
        options = options if rung.lower_rung else rung.options
    if status.attempt > 0 and status.resolved is None:
        # An edit has removed it. Chips are counted, and their budget enforced, by what the gang runs on.
        status = replace(status, resolved=option.resolution.resolved)
    ctx = Context(observed, status, look.now, options, option, lower_rungs=lower, rung=rung)
    status = apply_report(status, observed.report, option.resolution.steps, look.now, ctx.holding)
    status = complete_start(status, [] if ctx.missing else ctx.pods, observed.report)
    return replace(ctx, status=complete_move(status, observed, options, option))


def _decide(ctx: Context) -> Plan:
    """Decides about a job whose spec is valid and which has not finished. The first case that applies decides."""
    if (verdict := judge_first_steps(ctx)) is not None:
        return verdict
    if ctx.attempt > 0 and not ctx.missing and all(map(has_succeeded, ctx.pods)):
        # Even if the job is to be suspended, or is being suspended: nothing is left to suspend.
        if ctx.resolution.lower_rung is not None:
            return finish_rung(ctx)
        return succeed(ctx, ctx.pods, ctx.goodput_at_end(ctx.now), ctx.resolution.steps)
    if ctx.job.spec.run_policy.suspend:
        checking = (
            [ctx.observed.entry_check_pod] if ctx.is_checking and ctx.observed.entry_check_pod else ctx.idle_entry_check
        )
        return suspend(ctx, BY_USER, [*checking, *ctx.all_workers]).due_within(look_at_suspended(ctx))
    if (checks := check_entry(ctx)) is not None:
        return checks
    if (stops := budget.stop_over_budget(ctx)) is not None:
        return stops.due_within(look_at_suspended(ctx))
    if ctx.queue is not None and (waits := wait_for_admission(ctx, ctx.queue)) is not None:
        # A gang that Kueue stops on this slice may already be admitted on a better one.
        return move_once_admitted(ctx) or waits
    if not ctx.may_have_workers:
        return start(ctx)
    limit = ctx.job.spec.run_policy.active_deadline_seconds
    left = None if limit is None else timedelta(seconds=limit - active_seconds(ctx.settled_goodput()))
    if left is not None and left <= AT_ONCE:
        status = replace(ctx.status, goodput=ctx.goodput_at_end(ctx.now))
        return fail(ctx, status, Reason.DEADLINE_EXCEEDED, describe_deadline(limit))
    if any(pod.placed is None for pod in ctx.pods):
        # The job's active time does not run now. A pod event will cause a pass once its workers are placed.
        left = None
    decision = keep_alive(ctx)
    if decision.turn is Turn.NONE and ctx.has_alternatives:
        better = move_once_held(ctx) if ctx.queue is None else move_once_admitted(ctx)
        if better is not None:
            return better
    queue_look = None if ctx.queue is None else LOOK_AT_RUNNING
    return decision.due_within(look_again(ctx.leftovers, ctx.now), left, queue_look, budget.next_look(ctx))


def _contribute(ctx: Context, decision: Plan) -> Plan:
    """Adds what placeholders and Kueue need beside the decision. A pass that begins an attempt does nothing else."""
    if decision.turn is Turn.ATTEMPT:
        return decision
    if ctx.has_alternatives or ctx.observed.placeholders:
        decision = decision.then(hold_nodes(ctx, decision.turn))
    if decision.turn is not Turn.NONE or ctx.queue is None:
        return decision
    # Kueue first: a refusal by the cluster ends the pass, and Kueue must still learn that the gang cannot start.
    return tell_pods_ready(ctx).then(decision, ask_for_better_slice(ctx))


def _plan_without_spec(stored: JobState, error: InvalidJob) -> Plan:
    """Plans for a job whose spec cannot be used. Its workers' reports still count."""
    status, resolved = stored.status, stored.status.resolved
    steps = resolved.train_steps if resolved else 0
    look = replace(stored, status=apply_report(status, stored.observed.report, steps, stored.now, stored.holding))
    decision = plan_invalid(look, error)
    if decision.status and replace(decision.status, progress=status.progress, goodput=status.goodput) == status:
        decision = replace(decision, status=None)
    return _complete(decision, look, status, read_budget(stored))


def _complete(
    decision: Plan, look: JobState, stored: Status, limit: ChipBudget | None = None, option: SliceOption | None = None
) -> Plan:
    """Returns the plan with reports, the generation and the use of chips brought up to date in its status. `stored`:
    the status without the reports. `option`: the slice that the job runs on; None without a spec."""
    status = decision.status
    if status is None and look.status != stored:
        # A report alone causes a write only now and then.
        wait = write_due(stored, look.observed.inbox, look.now)
        status, decision = (look.status, decision) if wait <= AT_ONCE else (None, decision.due_within(wait))
    if status is None and stored.observed_generation != look.observed.generation and not look.is_leaving:
        # A change of a restart limit needs no other action, but until it is observed, kstatus takes the job for one in
        # progress.
        status = replace(look.status, observed_generation=look.observed.generation)
    decision = budget.record_usage(replace(decision, status=status), look, stored, limit)
    status = decision.status
    if option is not None and (status is not None or is_wrong(stored, option)):
        begins = decision.turn is Turn.ATTEMPT
        status = keep_record(status or look.status, stored, option, look.now, begins=begins)
    elif status is not None and stored.placement is not None and option is None:
        status = charge_slice(status, stored, stored.placement.slice)
    return replace(decision, status=status)
