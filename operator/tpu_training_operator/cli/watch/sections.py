"""Describes a job in sections: `tpujob status` prints the full lines, `tpujob watch` the brief ones."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from tpu_contract.protocol import ReportPhase, StartPhase
from tpu_contract.words import several
from tpu_training_operator.api.conditions import ConditionType, Reason, find, is_true
from tpu_training_operator.api.constants import MULTIKUEUE
from tpu_training_operator.api.decimals import readable
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import Activity, AttemptStart, Failure, Move, Placement, Progress, State
from tpu_training_operator.api.words import count, duration
from tpu_training_operator.cli.common.terminal import ago
from tpu_training_operator.cli.plan.ladder import rung_lines
from tpu_training_operator.cli.watch.job_view import JobView
from tpu_training_operator.domain.cluster_state.hosts import HostGroup, Hosts, group_words
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.failures.messages import describe_attempt, describe_class, describe_place, gist
from tpu_training_operator.domain.plan.common.accounts import account_of
from tpu_training_operator.domain.plan.common.restart_limits import ClassRestarts
from tpu_training_operator.domain.plan.stopping.budget import format_hours

_MOST_GROUPS = 4
_MOST_NAMES = 4
_MOST_NODES = 8
_MOST_STARTS = 4
_BAR = 30
# A worker reports every ten seconds, even during a long step.
_STALE_SECONDS = 60


@dataclass(frozen=True)
class Section:
    """`full`: all lines. `brief`: the lines of a live display. `style`: rich's style for the text."""

    label: str
    full: tuple[str, ...]
    brief: tuple[str, ...]
    style: str = ""


def sections(view: JobView, command: str) -> list[Section]:
    """Returns the sections that have any lines. `command`: how `tpujob` was called."""
    every_section = [
        _manager_section(view),
        _why(view),
        _next(view),
        *_spec(view),
        _full_only("ladder", rung_lines(view.status.rungs)),
        _full_only("moves", move_lines(view.status.placement, view.now)),
        _compiled_section(view),
        _hosts(view),
        *_progress(view),
        *_failures(view),
        _restarts(view),
        *_nodes(view),
        _full_only("starts", start_lines(view.status.starts[-_MOST_STARTS:])),
        _time(view),
        *_chips(view),
        _full_only("to do", advice(view, command), "bold"),
    ]
    return [section for section in every_section if section.full or section.brief]


def headline(view: JobView) -> str:
    state = view.state_word or (f"managed by {view.manager}" if view.manager else "not seen by an operator yet")
    attempt = f"attempt {view.status.attempt}" if view.status.attempt else ""
    rung = f"rung {view.status.ladder}" if view.status.ladder else ""
    end = "being deleted" if view.is_being_deleted else ""
    return ", ".join(part for part in (f"{view.name}: {state}", end, rung, attempt, view.slice) if part)


def state_style(view: JobView) -> str:
    match view.state:
        case State.RUNNING | State.SUCCEEDED:
            return "green"
        case State.FAILED | State.INVALID | State.BLOCKED:
            return "red"
        case State.QUEUED | State.STARTING | State.RESTARTING:
            return "yellow"
        case _:
            return ""


def plain_lines(view: JobView) -> list[str]:
    """Returns the lines that change with the job, without clocks: printing each new line gives a log of the job."""
    parts = [headline(view)]
    if hosts := _visible_hosts(view):
        parts += [f"{hosts.ready + hosts.finished}/{hosts.total} hosts", *map(_group, hosts.others[:1])]
    if progress := view.status.progress:
        parts += [f"step {progress.step}/{progress.total_steps}", *_numbers(progress)]
        if progress.checkpoint_step is not None:
            parts.append(f"checkpoint {progress.checkpoint_step}")
    failure = view.status.last_failure
    details = {
        "metrics": [", ".join(_metrics(progress))] if progress and progress.metrics else [],
        "best": [best] if progress and (best := best_checkpoint(progress)) else [],
        "why": _why(view).brief,
        "failure": [f"{_failure_line(failure)}: {gist(failure)}"] if failure else [],
        "warning": progress.warnings if progress else [],
    }
    return [", ".join(parts), *(f"  {label}: {text}" for label, texts in details.items() for text in texts)]


def _always(label: str, lines: Iterable[str], style: str = "") -> Section:
    lines = tuple(lines)
    return Section(label, lines, lines, style)


def _full_only(label: str, lines: Iterable[str], style: str = "") -> Section:
    return Section(label, tuple(lines), (), style)


def _why(view: JobView) -> Section:
    """Shows the operator's message. The live display omits it for a healthy job."""
    lines = tuple(view.message.splitlines())
    needs_none = view.state in (State.RUNNING, State.SUCCEEDED)
    return Section("why", lines, () if needs_none else lines[:1], state_style(view))


def _compiled_section(view: JobView) -> Section:
    """Shows what the entry check has found about the compiled step."""
    condition = find(view.status.conditions, ConditionType.STEP_FITS)
    return _full_only("compiled", [] if condition is None else [condition.message])


def _manager_section(view: JobView) -> Section:
    """Names another controller that runs the job. Its pods, if any, are in another cluster."""
    if not view.manager:
        return _full_only("managed by", ())
    if view.manager == MULTIKUEUE:
        return _full_only(
            "managed by", [f"{view.manager}: Kueue runs the job in another cluster and copies its status here"]
        )
    return _full_only("managed by", [f"{view.manager}; this cluster's operator ignores the job"])


def move_lines(placement: Placement | None, now: datetime) -> Iterator[str]:
    """Yields a line for each move in the status, the newest last, then the chip-hours on each slice."""
    if placement is None or not placement.moves:
        return
    for move in placement.moves:
        yield f"{ago(parse_time(move.at), now)}: {move_words(move)}"
    by_slice = [f"{name} {format_hours(seconds)}" for name, seconds in placement.chip_seconds.items()]
    if by_slice:
        yield f"chip-hours: {', '.join(by_slice)}"


def move_words(move: Move) -> str:
    """Returns for example: v6e-16 to v5p-32 at step 120: 4 placeholders hold the nodes of v5p-32; ..."""
    before, after = move.from_slice or f"slice {move.from_}", move.to_slice or f"slice {move.to}"
    step = f" at step {move.step}" if move.step else ""
    if move.continued_step is not None and move.continued_examples != move.examples:
        step += f", continued from step {move.continued_step}"
    return f"{before} to {after}{step}: {move.why}"


def _next(view: JobView) -> Section:
    wait = view.next_attempt_in
    return _always("next", [f"attempt {view.status.attempt} in {duration(wait.total_seconds())}"] if wait else [])


def _spec(view: JobView) -> list[Section]:
    resolved = view.status.resolved
    if resolved is None:
        return []
    sizes = (count(resolved.hosts, "host"), count(resolved.chips, "chip"), count(resolved.replicas, "replica"))
    rehearsal = ", rehearsed on CPU" if view.is_rehearsal else ""
    batch = f"global batch {resolved.global_batch_size}, {resolved.per_replica_batch_size} per replica"
    rate = readable(resolved.learning_rate)
    packages = view.status.progress.packages_sha256 if view.status.progress else None
    return [
        _full_only("slice", [f"{view.slice} ({resolved.topology}): {', '.join(sizes)}{rehearsal}"]),
        _full_only("code", [f"sha256 {resolved.code_sha256}"] if resolved.code_sha256 else []),
        _full_only("packages", [f"sha256 {packages}"] if packages else []),
        _full_only("recipe", [f"{batch}; {resolved.train_steps} steps; learning rate {rate}"]),
        _full_only("warning", resolved.warnings, "yellow"),
    ]


def _visible_hosts(view: JobView) -> Hosts | None:
    without = (State.QUEUED, State.SUSPENDED, State.SUCCEEDED, State.FAILED, State.INVALID)
    # The entry check, before the first attempt, has no hosts, and pods in another cluster are not visible here.
    return None if view.state in without or not view.status.attempt or view.manager else view.hosts


def _hosts(view: JobView) -> Section:
    hosts = _visible_hosts(view)
    if hosts is None:
        return _always("hosts", [])
    finished = f", {hosts.finished} finished" if hosts.finished else ""
    lines = [f"{hosts.ready}/{hosts.total} ready{finished}", *map(_group, hosts.others[:_MOST_GROUPS])]
    if rest := hosts.others[_MOST_GROUPS:]:
        lines.append(f"{count(sum(len(group.workers) for group in rest), 'host')}: other reasons")
    if hosts.earlier:
        lines.append(f"{count(hosts.earlier, 'worker')} of earlier attempts still there")
    return _always("hosts", lines, "yellow" if len(lines) > 1 else "")


def _group(group: HostGroup) -> str:
    """Describes hosts in one state. Names their nodes only if they are few, because then a node may be the cause."""
    nodes = f" on {', '.join(group.nodes)}" if 0 < len(group.nodes) <= _MOST_NAMES else ""
    return f"{group_words(group)} ({several(group.places, _MOST_NAMES)}{nodes})"


def _progress(view: JobView) -> list[Section]:
    """Shows the last report. Its age matters only while the job runs."""
    progress = view.status.progress
    if progress is None:
        waits = "nothing reported yet" if view.has_own_loop else "nothing reported yet: the hosts import torch and meet"
        return [_always("step", [waits])] if view.is_running else []
    done = min(1.0, progress.step / progress.total_steps) if progress.total_steps > 0 else 0.0
    bar = "━" * int(_BAR * done) + "─" * (_BAR - int(_BAR * done))
    phase = f", {_phase(progress.phase)}" if progress.phase and view.is_running else ""
    step = f"{progress.step}/{progress.total_steps} {bar} {int(100 * done)} %{phase}"
    saved = [f"step {progress.checkpoint_step}"] if progress.checkpoint_step is not None else []
    facts = {"checkpoint": saved, "best": [best] if (best := best_checkpoint(progress)) else []}
    if view.is_running or view.has_succeeded:
        facts = {"speed": _numbers(progress), "metrics": _metrics(progress), **facts}
    return [
        _always("step", [step]),
        *(_always(label, [", ".join(words)]) for label, words in facts.items() if words),
        *([_report_age(view, progress)] if view.is_running else []),
        *(_always("warning", [warning], "yellow") for warning in progress.warnings),
    ]


def _phase(phase: ReportPhase) -> str:
    return "starting: loads the task, compiles the first steps" if phase is ReportPhase.STARTING else phase.lower()


def best_checkpoint(progress: Progress) -> str:
    """Returns for example: val_loss 0.12 at step 240, step-00000240-5f0c1234-1; "" without checkpoint.keepBest."""
    best = progress.best_checkpoint
    return f"{best.metric} {best.value} at step {best.step}, {best.name}" if best else ""


def _metrics(progress: Progress) -> list[str]:
    """Returns the metrics of the last evaluation and the values that the task logs."""
    return [f"{name} {value}" for name, value in progress.metrics.items()]


def _numbers(progress: Progress) -> list[str]:
    speed, loss, left = progress.examples_per_second, progress.loss, progress.estimated_remaining_seconds
    numbers = [f"{speed} examples/s" if speed is not None else "", f"loss {loss}" if loss is not None else ""]
    return [text for text in (*numbers, f"about {duration(left)} left" if left is not None else "") if text]


def _report_age(view: JobView, progress: Progress) -> Section:
    if progress.last_report_time is None:
        return _always("reported", [])
    reported = parse_time(progress.last_report_time)
    advanced = parse_time(progress.last_advance_time) if progress.last_advance_time else view.now
    still = (view.now - advanced).total_seconds()
    is_stale = max(still, (view.now - reported).total_seconds()) > _STALE_SECONDS
    standstill = f", no progress for {duration(still)}" if still > _STALE_SECONDS else ""
    return _always("reported", [f"{ago(reported, view.now)}{standstill}"], "yellow" if is_stale else "")


def _failures(view: JobView) -> list[Section]:
    first, last = view.status.first_failure, view.status.last_failure
    failures = []
    if last is not None:
        brief = (f"{_failure_line(last)}, {ago(parse_time(last.time), view.now)}", gist(last))
        failures.append(Section("failure", _failure_in_full(last, view), brief))
    if first is not None and first != last:
        failures.append(_full_only("first one", _failure_in_full(first, view)))
    return failures


def _failure_line(failure: Failure) -> str:
    return f"{describe_class(failure)}: {describe_place(failure)}{describe_attempt(failure)}"


def _failure_in_full(failure: Failure, view: JobView) -> tuple[str, ...]:
    where = f"{describe_class(failure)}: {describe_place(failure)}, pod {failure.pod}"
    when = f"{ago(parse_time(failure.time), view.now)}{describe_attempt(failure)}"
    if view.status.attempt > failure.attempt:
        done = f"The gang was restarted as attempt {failure.attempt + 1}."
    else:
        done = "The job has failed for good." if view.has_failed else "The gang is to be restarted."
    return (f"{where}, {when}", *failure.message.splitlines(), done)


def _restarts(view: JobView) -> Section:
    used = [restarts for restarts in view.restarts_by_class if restarts.total]
    brief = ", ".join(f"{r.failure_class} {r.total}" + ("" if r.left is None else f" ({r.left} left)") for r in used)
    full = tuple(f"{r.failure_class:<15}{r.total:>4}   {_describe_left(r, view.window)}" for r in used)
    return Section("restarts", full, (brief,) if used else ())


def _describe_left(restarts: ClassRestarts, window: str) -> str:
    if restarts.limit is None:
        return "unlimited"
    return f"{restarts.left} of {restarts.limit} left ({restarts.counting} count: within {window}, no checkpoint since)"


def _nodes(view: JobView) -> list[Section]:
    faults = [f"{fault.node} ({ago(parse_time(fault.time), view.now)})" for fault in view.status.device_faults]
    avoided = view.status.avoided_nodes
    return [
        _full_only("faults", [f"of chips on {several(faults, _MOST_NODES)}"] if faults else []),
        _full_only("avoided", [several(avoided, _MOST_NODES)] if avoided else []),
    ]


def start_lines(starts: Sequence[AttemptStart]) -> Iterator[str]:
    """Yields a table of the phases up to the first step: a column for each attempt, the newest last."""
    if not starts:
        return
    phases = [phase for phase in StartPhase if any(start.seconds.get(phase) for start in starts)]
    columns = [
        (start.attempt, start.cause, *map(_lasted, (*map(start.seconds.get, phases), start.total_seconds)))
        for start in starts
    ]
    for name, *cells in zip(("attempt", "after", *phases, "together"), *columns, strict=True):
        yield f"{name:<11}" + "".join(f"{cell:>18}" for cell in cells)


def _lasted(seconds: int | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _time(view: JobView) -> Section:
    """Shows where the time went; the parts add up to the job's life."""
    goodput = view.goodput
    if goodput is None:
        return _always("time", [])
    parts = goodput.by_account
    now = "" if goodput.activity is Activity.FINISHED else account_of(goodput.activity, goodput)
    ratio = goodput.ratio if goodput.productive else None
    brief = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds) or "0s"
    full = [
        f"{name:<11}{duration(seconds):>8}{_share(seconds, view.life):>6}{'   <- now' if is_now else ''}"
        for name, seconds in parts.items()
        if (is_now := name == now) or seconds
    ]
    full.append(f"{'together':<11}{duration(view.life):>8}   since {view.created:%Y-%m-%d %H:%M:%S} UTC")
    if ratio is not None:
        full.append(f"{'goodput':<11}{ratio:>8}   productive share of the time without suspensions")
    return Section("time", tuple(full), (brief + (f"; goodput {ratio}" if ratio is not None else ""),))


def _chips(view: JobView) -> list[Section]:
    """Shows the chip-hours used, allowed and expected, what the chips did, and the cost."""
    spent, usage = view.goodput.chip_seconds if view.goodput else None, view.status.usage
    if spent is None:
        return []
    budget = usage.budget_chip_hours if usage else None
    forecast = usage.forecast_chip_hours if usage else None
    used = f"{format_hours(spent.total)}{f' of {budget}' if budget else ''} chip-hours used"
    if budget and spent.held and spent.total < budget * 3600:
        used += f"; the rest lasts {duration((budget * 3600 - spent.total) // spent.held)} at {spent.held} chips"
    if forecast and not view.is_over:
        short = ", more than the budget" if budget and float(forecast) > budget else ""
        used += f"; about {forecast} when it ends{short}"
    parts = [f"{name} {format_hours(part)}" for name, part in spent.by_account.items() if part]
    cost = _cost(view, format_hours(spent.total), None if view.is_over else forecast)
    full = (used, *([", ".join(parts)] if parts else []), *cost)
    is_low = is_true(view.status.conditions, ConditionType.BUDGET_LOW)
    return [Section("chips", full, (used,) if budget else (), "yellow" if is_low else "")]


def _cost(view: JobView, used: str, forecast: str | None) -> list[str]:
    if view.prices is None:
        return []
    so_far, in_the_end = (view.prices.cost(chip_hours, view.status) for chip_hours in (used, forecast))
    if so_far is None:
        missing = ", ".join(view.prices.unpriced_slices(view.status)) or "a job that has not been resolved"
        return [f"cost unknown: the table has no price for {missing}"]
    return [f"cost {so_far} so far" + (f", about {in_the_end} when it ends" if in_the_end else "")]


def _share(seconds: int, life: int) -> str:
    return f"{100 * seconds / life:.0f} %" if life else ""


_AFTER_THE_END = {
    FailureClass.USER_ERROR: "correct the code or the job, then submit it again with --replace. With spec.checkpoint it"
    " continues with the weights of the old code; --from-scratch begins at step 0.",
    FailureClass.INFRASTRUCTURE: "see whether it is the same node every time (kubectl describe node) and have it"
    " repaired. Then create the job again; with spec.checkpoint it continues where it was.",
    FailureClass.PREEMPTION: "you set its limit; max -1 for Preemption in spec.runPolicy.restart.limits is unlimited.",
    FailureClass.OUT_OF_MEMORY: "give the workers more memory (spec.trainer.resources), or use less: a smaller batch,"
    " fewer data loader processes.",
    FailureClass.HANG: "the worker's log has the stack of every thread. The usual cause is a collective that not every"
    " host reaches.",
    FailureClass.NOT_FINITE: "lower the learning rate, warm up for longer, or check the data of the step that the"
    " message names; then create the job again.",
    FailureClass.UNKNOWN: "look at the worker's log.",
}
_AFTER_A_RESTART = {
    FailureClass.USER_ERROR: "the cause is in your code, so it will fail again.",
    FailureClass.NOT_FINITE: "the same steps will end the same way unless the recipe or the data change.",
    FailureClass.OUT_OF_MEMORY: "it will fail again unless the workers get more memory (spec.trainer.resources).",
    FailureClass.HANG: "if it hangs again, compare the stacks in the workers' logs.",
}


def advice(view: JobView, command: str) -> list[str]:
    """Returns what the user should do next, in sentences; docs/failures.md has the details."""
    job = f"{view.name} -n {view.namespace}"
    match view.state:
        case None if view.manager and not view.state_word:
            return []
        case None if not view.state_word:
            return [
                "No operator has looked at this job yet. Does one run, and does it serve this namespace?"
                " kubectl get deployments -A -l app.kubernetes.io/name=tpu-training-operator"
            ]
        case State.INVALID:
            return ["Correct what the message names, then submit the job again with --replace."]
        case State.BLOCKED:
            return [
                "Remove what the message names; the operator tries again every 30 s. If the job itself is wrong,"
                " suspend it, correct it and resume it."
            ]
        case State.QUEUED:
            return []
        case State.SUSPENDED if _is_over_budget(view, ConditionType.SUSPENDED):
            raised = """-p '{"spec":{"runPolicy":{"budget":{"chipHours":N}}}}'"""
            return [f"To go on, with N above what is used: kubectl patch tpujob {job} --type=merge {raised}"]
        case State.SUSPENDED:
            return [f"To resume: {command} resume {job}"]
        case State.FAILED:
            return _after_the_end(view, f"{command} logs {job} --failed")
        case State.SUCCEEDED:
            return []
        case State.RUNNING if view.status.progress is None and view.has_own_loop:
            return ["Your own loop shows its steps here if it reports them: docs/progress.md."]
        case _:
            return [*_without_node(view), *_about(view.status.last_failure, _AFTER_A_RESTART)]


def _is_over_budget(view: JobView, kind: ConditionType) -> bool:
    condition = find(view.status.conditions, kind)
    return condition is not None and condition.is_true and condition.reason == Reason.BUDGET_EXCEEDED


def _after_the_end(view: JobView, log: str) -> list[str]:
    if _is_over_budget(view, ConditionType.FAILED):
        return [
            "Its chip-hours were used up. A new job of the same name and checkpoint.uri continues from the newest"
            " checkpoint, with its own budget."
        ]
    failed, failure = find(view.status.conditions, ConditionType.FAILED), view.status.last_failure
    if failed is not None and failed.reason == Reason.DEADLINE_EXCEEDED:
        return [
            "It ran out of time. A new job with a longer spec.runPolicy.activeDeadlineSeconds continues from the newest"
            " checkpoint."
        ]
    if failed is not None and failed.reason == Reason.GATE_FAILED:
        return [
            f"The log of the rung: {log.removesuffix(' --failed')}. Correct the code or the recipe, or ask less of the"
            " gate; then submit the job again with --replace: it starts at the first rung. See docs/ladder.md#gates."
        ]
    return [*_about(failure, _AFTER_THE_END), f"Its log: {log}"] if failure else []


def _about(failure: Failure | None, words: dict[FailureClass, str]) -> list[str]:
    if failure is None or failure.failure_class not in words:
        return []
    kind = failure.failure_class
    return [f"After {kind}: {words[kind]} See docs/failures.md#{kind.lower()}."]


def _without_node(view: JobView) -> Sequence[str]:
    """Returns how to ask the scheduler why a gang still waits for nodes."""
    waits = view.goodput is not None and view.goodput.activity is Activity.QUEUE
    without = [group.workers[0] for group in view.hosts.others if group.is_unscheduled] if view.hosts and waits else []
    if not without:
        return []
    pod = without[0].pod_name(view.name)
    return [f"It waits for nodes. What the scheduler and the autoscaler say: kubectl describe pod {pod}"]
