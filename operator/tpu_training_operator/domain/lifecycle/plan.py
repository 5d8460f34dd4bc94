"""The planner: what to do next about one job.

The attempt protocol. An attempt exists once `status.attempt` says so: the number is raised, with the job's
resourceVersion as precondition, in a pass that does nothing else. Later passes converge the pods to it: workers of
another attempt are deleted, and only when they are gone, or their node is, the attempt's own are created. A crash
between any two effects leaves a state that the next pass continues from, and of two operators only one can raise the
number.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from tpu_training_operator.api.conditions import ConditionType, Reason, is_true
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.status import Activity, Failure, Goodput, State, Status
from tpu_training_operator.api.validation import InvalidJob, parse_job
from tpu_training_operator.domain.actions import AskForStacks, Create, DeleteConfigMap, Event, Plan
from tpu_training_operator.domain.failures.first import first_failure, hang, missing_worker, next_look
from tpu_training_operator.domain.failures.hang import STACKS_WAIT, stacks_due, standstill, straggler
from tpu_training_operator.domain.failures.pod_signs import has_succeeded
from tpu_training_operator.domain.lifecycle import goodput as accounts
from tpu_training_operator.domain.lifecycle.completion import active_time_left, after_the_end, exceed_deadline, succeed
from tpu_training_operator.domain.lifecycle.conditions import Kind, Picture
from tpu_training_operator.domain.lifecycle.context import Situation
from tpu_training_operator.domain.lifecycle.invalid import invalid
from tpu_training_operator.domain.lifecycle.pod_cleanup import by_force, deletions, in_the_way, look_again, next_force
from tpu_training_operator.domain.lifecycle.progress import heard, new_attempt, write_due
from tpu_training_operator.domain.lifecycle.restart import fail_or_restart, is_half_made, release
from tpu_training_operator.domain.lifecycle.restart_budget import longest_wait
from tpu_training_operator.domain.lifecycle.stale_status import is_behind, take_up, wait_for_news
from tpu_training_operator.domain.lifecycle.start_deadline import held_up, not_started, starts_late
from tpu_training_operator.domain.lifecycle.waiting import tell_why
from tpu_training_operator.domain.naming import config_map_name
from tpu_training_operator.domain.objects.shared import check_config_map, config_map, service
from tpu_training_operator.domain.objects.worker_creations import WorkerCreations
from tpu_training_operator.domain.observed import Observed, format_time, parse_time
from tpu_training_operator.domain.recipe.resolve import check_hosts, resolve
from tpu_training_operator.domain.report import Reporting
from tpu_training_operator.domain.words import count, every

_AT_ONCE = timedelta(0)


def plan(observed: Observed, now: datetime, reporting: Reporting | None = None, *, max_hosts: int = MAX_HOSTS) -> Plan:
    """The next actions and the status to write. The same arguments give the same plan.

    `reporting`: where the workers report to; None where nobody listens. `max_hosts`: a job with more hosts is not
    begun; one that has begun under another bound goes on.
    """
    status = Status.read(observed.job.get("status"))
    if "deletionTimestamp" in observed.job["metadata"]:
        # Everything the job owns goes with it, by its owner references; but no dead node lets go of a pod.
        return Plan(stages=by_force(observed.pods, now), again=next_force(observed.pods, now))
    if _has_finished(status):
        return _noting_generation(after_the_end(observed, status, now), status, observed)
    try:
        job = parse_job(observed.job)
        resolution = resolve(job.spec)
        observed = observed.within(resolution.layout)
        if status.attempt == 0 and not observed.pods:
            check_hosts(resolution, max_hosts)
            check_config_map(job, resolution)
    except InvalidJob as error:
        return invalid(observed, status, error, now)
    if status.attempt == 0 and observed.pods:
        return take_up(Situation(job, resolution, status, observed, now, reporting))
    told = heard(status, observed.report, resolution.recipe.train_steps, now)
    here = Situation(job, resolution, told, observed, now, reporting)
    return _noting_generation(_noting_progress(_next(here), here, status), told, observed)


def _has_finished(status: Status) -> bool:
    """Its conditions or its completion time say so: an edit of the status may leave only one of them, and a finished
    job must not train again."""
    ends = (ConditionType.SUCCEEDED, ConditionType.FAILED)
    return status.completion_time is not None or any(is_true(status.conditions, end) for end in ends)


def _noting_generation(decided: Plan, status: Status, observed: Observed) -> Plan:
    """The plan, with a status where only the generation is new: a change of a restart limit asks for nothing else,
    but as long as it is not observed, kstatus takes the job for one in progress."""
    generation = observed.job["metadata"].get("generation", 1)
    if decided.status is not None or status.observed_generation == generation:
        return decided
    return replace(decided, status=replace(status, observed_generation=generation))


def _noting_progress(decided: Plan, here: Situation, stored: Status) -> Plan:
    """The plan, with a status where only what the workers report is new, as often as that is worth a write."""
    if decided.status is not None or here.status == stored:
        return decided
    wait = write_due(stored, here.observed.inbox, here.now)
    return replace(decided, status=here.status) if wait <= _AT_ONCE else _by(wait, decided)


def _by(wait: timedelta | None, decided: Plan) -> Plan:
    """The plan, and another look after `wait` at the latest."""
    if wait is None or (decided.again is not None and decided.again <= wait):
        return decided
    return replace(decided, again=wait)


def _next(here: Situation) -> Plan:
    """The cases, in the order in which they are decided."""
    pods, missing = here.pods, here.missing
    begun = here.attempt > 0 and not is_true(here.status.conditions, ConditionType.SUSPENDED)
    if here.attempt > 0 and not missing and all(map(has_succeeded, pods)):
        # Before a wish to suspend, and while it is carried out: there is nothing left to suspend.
        return succeed(here)
    if here.job.spec.run_policy.suspend:
        return _suspend(here)
    if not begun:
        return _begin(here)
    left = active_time_left(here)
    if left is not None and left <= _AT_ONCE:
        return exceed_deadline(here)
    if any(pod.placed is None for pod in pods):
        # It is not active now; when its workers are placed we hear of it.
        left = None
    return _by(left, _by(look_again(here.leftovers, here.now), _keep_alive(here)))


def _keep_alive(here: Situation) -> Plan:
    """The gang of the present attempt: it is made, watched, and replaced when it fails."""
    if here.missing and is_behind(here):
        return wait_for_news()
    unwanted = deletions(here.leftovers, here.now)
    if unwanted or in_the_way(here.leftovers):
        return Plan(stages=unwanted)
    if failure := _failure(here):
        return fail_or_restart(here, failure)
    if here.missing:
        return _create_missing(here)
    return _by(next_look(here.pods, here.now), _watch(here))


def _begin(here: Situation) -> Plan:
    """The first attempt, or the one after a suspension: charged to no failure class."""
    attempt = here.next_attempt
    is_resumed = is_true(here.status.conditions, ConditionType.SUSPENDED)
    goodput = _accounts_of_stopped(here) if is_resumed else None
    status = replace(
        here.status,
        attempt=attempt,
        resolved=here.resolution.resolved,
        start_time=here.status.start_time or format_time(here.now),
        progress=new_attempt(here.status.progress),
        goodput=accounts.charge(goodput or here.goodput(), here.now, Activity.QUEUE),
    )
    picture = _starting(here, attempt)
    resumed: tuple[Event, ...] = ()
    if is_resumed:
        resumed = (Event("Resumed", "spec.runPolicy.suspend is off"),)
        status = here.mark(status, ConditionType.SUSPENDED, False, Reason.RESUMED, "suspend is off")
    status = here.mark(status, ConditionType.GANG_READY, False, picture.reason, picture.message)
    return Plan(
        status=here.present(status, picture),
        events=(*resumed, Event("AttemptStarted", picture.message)),
        again=_AT_ONCE,
    )


def _starting(here: Situation, attempt: int) -> Picture:
    layout = here.resolution.layout
    message = f"attempt {attempt}: waiting for {count(layout.hosts, 'worker')} on {layout} to become ready"
    return Picture(State.STARTING, Kind.IN_PROGRESS, Reason.WAITING_FOR_WORKERS, message)


def _suspend(here: Situation) -> Plan:
    """Every worker is told to stop, saves what it has done and goes; nothing is charged for it."""
    pods = [*here.observed.before_attempt(here.attempt), *here.pods]
    message = "suspended by spec.runPolicy.suspend; no workers are kept"
    picture = Picture(State.SUSPENDED, Kind.SETTLED, Reason.SUSPENDED, message)
    if pods:
        message = f"waiting for {count(len(pods), 'worker')} to stop"
        picture = Picture(State.SUSPENDED, Kind.IN_PROGRESS, Reason.SUSPENDED, message)
    if is_true(here.status.conditions, ConditionType.SUSPENDED):
        # Until they have stopped, they may still report what they saved.
        goodput = here.status.goodput if pods else _accounts_of_stopped(here)
        status = replace(here.status, goodput=goodput)
        return Plan(
            stages=deletions(pods, here.now),
            status=here.present(status, picture),
            again=look_again(pods, here.now),
        )
    # Before any worker is stopped: one that goes unannounced would be a failure to whoever looks next.
    goodput = accounts.charge(here.goodput_at_end(here.now), here.now, Activity.SUSPENDED)
    status = replace(here.status, goodput=goodput)
    status = here.mark(status, ConditionType.SUSPENDED, True, Reason.SUSPENDED, "suspend is on")
    if status.attempt:
        status = here.mark(status, ConditionType.GANG_READY, False, Reason.SUSPENDED, "suspend is on")
    events = (Event("Suspended", message),)
    return Plan(status=here.present(status, picture), events=events, again=_AT_ONCE)


def _accounts_of_stopped(here: Situation) -> Goodput | None:
    """Of an attempt that a suspension has stopped. Where its worker told of checkpoints, only what was trained before
    the last of them is safe; a trainer that cannot be heard saves before it stops."""
    goodput, progress = here.status.goodput, here.status.progress
    if goodput is None:
        return None
    was_heard = progress is not None and progress.phase is not None
    tells = was_heard and (here.reports or (progress is not None and progress.checkpoint_step is not None))
    if here.job.spec.checkpoint is None or tells:
        return accounts.lost(goodput)
    return accounts.saved(goodput)


def _failure(here: Situation) -> Failure | None:
    # In a loop of the user's own, exit code 1 may be all that is seen of a lost peer.
    own_loop = here.job.spec.trainer.entrypoint is None
    if failure := first_failure(here.pods, here.attempt, here.now, settle_user_errors=own_loop):
        return failure
    if here.missing and here.is_running:
        # A new worker could not join a training that runs: its peers have met without it.
        worker = here.missing[0]
        name = worker.pod_name(here.job.name)
        return missing_worker(name, worker.slice, worker.host, here.attempt, here.now)
    return None


def _create_missing(here: Situation) -> Plan:
    wait = _wait_for_its_time(here)
    if wait > _AT_ONCE:
        return Plan(again=wait)
    if here.is_refused and is_half_made(here):
        return release(here, len(here.missing))
    job, attempt = here.job, here.attempt
    shared = (
        Create(service(job)),
        Create(config_map(job, here.resolution, attempt, here.reporting)),
        *((DeleteConfigMap(config_map_name(job.name, attempt - 1)),) if attempt > 1 else ()),
    )
    avoid = tuple(here.status.avoided_nodes)
    return Plan(stages=(shared, WorkerCreations(job, here.resolution, tuple(here.missing), here.reporting, avoid)))


def _wait_for_its_time(here: Situation) -> timedelta:
    """What is left of the wait before this attempt. A wait longer than there are any is a clock's that was set back."""
    earliest = here.status.restarts.next_attempt_time
    left = parse_time(earliest) - here.now if earliest else _AT_ONCE
    return left if left <= longest_wait(here.job.spec.run_policy) else _AT_ONCE


def _watch(here: Situation) -> Plan:
    pods = here.pods
    if here.is_running and not here.is_refused:
        return _watch_steps(here)
    if not all(pod.is_ready or pod.phase == "Succeeded" for pod in pods):
        again = None
        if part := held_up(pods, here.job.spec.run_policy, here.status.avoided_nodes):
            if here.now >= part.deadline:
                return release(here, part.waiting)
            again = part.deadline - here.now
        elif late := starts_late(pods, here.job.spec.run_policy):
            if here.now >= late.deadline:
                return fail_or_restart(here, not_started(late, here.attempt, here.now))
            again = late.deadline - here.now
        # A gang that starts is shown as such already, unless something stood in its way meanwhile.
        freed = here.present(here.status, _starting(here, here.attempt)) if here.is_refused else None
        return tell_why(here, Plan(status=freed, again=again))
    message = f"attempt {here.attempt}: {every(len(pods), 'worker')} ready"
    picture = Picture(State.RUNNING, Kind.SETTLED, Reason.ALL_WORKERS_READY, message)
    goodput = here.goodput()
    if not here.reports:
        goodput = accounts.charge(goodput, here.now, Activity.TRAIN)
    status = replace(here.status, goodput=goodput)
    status = here.mark(status, ConditionType.GANG_READY, True, picture.reason, picture.message)
    events = (Event("Running", message),)
    return Plan(status=here.present(status, picture), events=events, again=_AT_ONCE)


def _watch_steps(here: Situation) -> Plan:
    """Whether a gang that runs gets on; before it is restarted for a hang, its stacks are asked for."""
    late = straggler(here.pods, here.status, here.job.spec.run_policy)
    if late is None:
        return _watch_progress(here)
    if here.now >= late.deadline:
        return fail_or_restart(here, hang(late.pod, late.message, here.attempt, here.now, reason="Straggler"))
    # A reporter that has succeeded has no more steps to tell.
    others = Plan() if here.pods[0].phase == "Succeeded" else _watch_progress(here)
    return _by(late.deadline - here.now, others)


def _watch_progress(here: Situation) -> Plan:
    inbox = here.observed.inbox
    still = standstill(here.status, inbox, here.job.spec.run_policy, here.now, reports=here.reports)
    if still is None:
        return Plan()
    if here.now < still.deadline:
        return Plan(again=still.deadline - here.now)
    said = here.observed.report
    report = said if said and said.attempt == here.attempt else None
    wait = stacks_due(inbox, here.now)
    if report is not None and wait is None:
        return Plan(stages=((AskForStacks(),),), again=STACKS_WAIT)
    if wait is not None and wait > _AT_ONCE:
        return Plan(again=wait)
    stacks = f"; the worker's stacks:\n{report.stacks}" if report is not None and report.stacks else ""
    return fail_or_restart(here, hang(here.pods[0], still.message + stacks, here.attempt, here.now))
