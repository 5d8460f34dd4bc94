"""A job in words: the rows of `tpujob watch`, its line where there is no terminal, and the parts that `tpujob status`
says in the same way. Pure."""

from dataclasses import dataclass

from tpu_training_operator.api.status import Activity, Failure, Goodput, Progress, State
from tpu_training_operator.cli.job_view import JobView, until
from tpu_training_operator.cli.words import ago, duration, several
from tpu_training_operator.domain.failures.messages import failed_where, failed_why, gist
from tpu_training_operator.domain.hosts import Group, Hosts, group_words
from tpu_training_operator.domain.observed import parse_time
from tpu_training_operator.domain.words import count

_MOST_GROUPS = 4
_MOST_NAMES = 4
_BAR = 30
# A worker reports every ten seconds, also while a step takes long.
_STALE_SECONDS = 60
_WITHOUT_HOSTS = (State.SUSPENDED, State.SUCCEEDED, State.FAILED, State.INVALID)


@dataclass(frozen=True)
class Row:
    """`style`: rich's, for the text."""

    label: str
    text: str
    style: str = ""


def headline(view: JobView) -> str:
    state = view.state_word or "not seen by an operator yet"
    attempt = f"attempt {view.status.attempt}" if view.status.attempt else ""
    return ", ".join(part for part in (f"{view.name}: {state}", attempt, view.slice) if part)


def state_style(view: JobView) -> str:
    match view.state:
        case State.RUNNING | State.SUCCEEDED:
            return "green"
        case State.FAILED | State.INVALID | State.BLOCKED:
            return "red"
        case State.STARTING | State.RESTARTING:
            return "yellow"
        case _:
            return ""


def live_rows(view: JobView) -> list[Row]:
    return [
        *_why_row(view),
        *hosts_rows(view),
        *progress_rows(view, bar=True),
        *_restarts_row(view),
        *_failure_rows(view),
        *_time_row(view),
        *warning_rows(view),
    ]


def plain_rows(view: JobView) -> list[Row]:
    """Everything that changes, but for clocks: who prints what differs has a log of the job."""
    failure = [Row("failure", f"{_failed(view.failure)}: {gist(view.failure)}")] if view.failure else []
    return [Row("", _plain_line(view)), *_why_row(view)[:1], *failure, *warning_rows(view)]


def _plain_line(view: JobView) -> str:
    parts = [headline(view)]
    if hosts := _hosts_shown(view):
        waits = "".join(f", {_group(group)}" for group in hosts.others[:1])
        parts.append(f"{hosts.ready + hosts.finished}/{hosts.total} hosts{waits}")
    if (progress := view.progress) is not None:
        parts += [f"step {progress.step}/{progress.total_steps}", *_numbers(progress)]
        if progress.checkpoint_step is not None:
            parts.append(f"checkpoint {progress.checkpoint_step}")
    return ", ".join(parts)


def hosts_rows(view: JobView) -> list[Row]:
    hosts = _hosts_shown(view)
    if hosts is None:
        return []
    finished = f", {hosts.finished} finished" if hosts.finished else ""
    rows = [Row("hosts", f"{hosts.ready}/{hosts.total} ready{finished}")]
    rows += [Row("", _group(group), "yellow") for group in hosts.others[:_MOST_GROUPS]]
    if (left := hosts.others[_MOST_GROUPS:]) != ():
        rows.append(Row("", f"{count(sum(len(group.places) for group in left), 'host')}: other reasons", "yellow"))
    if hosts.earlier:
        rows.append(Row("", f"{count(hosts.earlier, 'worker')} of earlier attempts not gone yet", "yellow"))
    return rows


def progress_rows(view: JobView, *, bar: bool) -> list[Row]:
    """What was reported last; how it goes, only while it does."""
    progress = view.progress
    is_running = view.state is State.RUNNING
    if progress is None:
        return [Row("step", "nothing reported yet")] if is_running else []
    share = f"{_bar(progress)} {_percent(progress)}" if bar else f"({_percent(progress)})"
    phase = f", {progress.phase.lower()}" if progress.phase and is_running else ""
    rows = [Row("step", f"{progress.step}/{progress.total_steps} {share}{phase}")]
    numbers = _numbers(progress)
    if numbers and (is_running or view.has_succeeded):
        rows.append(Row("speed", ", ".join(numbers)))
    if view.has_succeeded and progress.metrics:
        rows.append(Row("metrics", ", ".join(f"{name} {value}" for name, value in progress.metrics.items())))
    if progress.checkpoint_step is not None:
        rows.append(Row("checkpoint", f"step {progress.checkpoint_step}"))
    if progress.last_report_time is not None and is_running:
        rows.append(_report_row(view, progress.last_report_time, progress.last_advance_time))
    return rows


def warning_rows(view: JobView) -> list[Row]:
    return [Row("warning", warning, "yellow") for warning in (view.progress.warnings if view.progress else ())]


def why(view: JobView) -> str:
    """The operator's words, without those of the worker that failed: they have a row of their own."""
    return view.message.replace(f": {gist(view.failure)}", "") if view.failure else view.message


def spent(goodput: Goodput) -> dict[str, int]:
    """Where the time went, in seconds, in the order in which a job spends it."""
    return {
        "queue": goodput.queue_seconds,
        "start": goodput.start_seconds,
        "productive": goodput.productive_seconds,
        "wasted": goodput.wasted_seconds,
        "recovery": goodput.recovery_seconds,
        "suspended": goodput.suspended_seconds,
    }


SPENT_NOW = {
    Activity.QUEUE: "queue",
    Activity.START: "start",
    Activity.TRAIN: "productive",
    Activity.RECOVERY: "recovery",
    Activity.SUSPENDED: "suspended",
}


def _why_row(view: JobView) -> list[Row]:
    """What the state says by itself needs no words."""
    if view.state in (State.RUNNING, State.SUCCEEDED) or not view.message:
        return []
    rows = [Row("why", why(view), state_style(view))]
    wait = until(view.status.restarts.next_attempt_time, view.now)
    if wait is not None and view.state is State.RESTARTING:
        rows.append(Row("next", f"attempt {view.status.attempt} in {duration(wait.total_seconds())}"))
    return rows


def _restarts_row(view: JobView) -> list[Row]:
    used = [budget for budget in view.budgets if budget.total]
    if not used:
        return []
    words = (f"{b.failure_class} {b.total}" + ("" if b.left is None else f" ({b.left} left)") for b in used)
    return [Row("restarts", ", ".join(words))]


def _failure_rows(view: JobView) -> list[Row]:
    failure = view.failure
    if failure is None:
        return []
    when = ago(parse_time(failure.time), view.now)
    return [Row("failure", f"{_failed(failure)}, {when}"), Row("", gist(failure))]


def _failed(failure: Failure) -> str:
    return f"{failed_why(failure)}: {failed_where(failure)}, attempt {failure.attempt}"


def _time_row(view: JobView) -> list[Row]:
    goodput = view.goodput
    if goodput is None:
        return []
    words = ", ".join(f"{name} {duration(seconds)}" for name, seconds in spent(goodput).items() if seconds)
    ratio = f"; goodput {goodput.ratio}" if goodput.ratio is not None and goodput.productive_seconds else ""
    return [Row("time", f"{words or '0s'}{ratio}")]


def _report_row(view: JobView, report: str, advance: str | None) -> Row:
    silence = (view.now - parse_time(report)).total_seconds()
    text = ago(parse_time(report), view.now)
    still = (view.now - parse_time(advance)).total_seconds() if advance else 0.0
    if still > _STALE_SECONDS:
        text += f", but no further for {duration(still)}"
    return Row("reported", text, "yellow" if max(silence, still) > _STALE_SECONDS else "")


def _hosts_shown(view: JobView) -> Hosts | None:
    return None if view.state in _WITHOUT_HOSTS else view.hosts


def _group(group: Group) -> str:
    """A few nodes may be the cause; many are not."""
    nodes = f" on {', '.join(group.nodes)}" if 0 < len(group.nodes) <= _MOST_NAMES else ""
    return f"{group_words(group)} ({several(group.places, _MOST_NAMES)}{nodes})"


def _numbers(progress: Progress) -> list[str]:
    numbers = []
    if progress.examples_per_second is not None:
        numbers.append(f"{progress.examples_per_second} examples/s")
    if progress.loss is not None:
        numbers.append(f"loss {progress.loss}")
    if progress.estimated_remaining_seconds is not None:
        numbers.append(f"about {duration(progress.estimated_remaining_seconds)} left")
    return numbers


def _share(progress: Progress) -> float:
    return min(1.0, progress.step / progress.total_steps) if progress.total_steps > 0 else 0.0


def _percent(progress: Progress) -> str:
    return f"{int(100 * _share(progress))} %"


def _bar(progress: Progress) -> str:
    done = int(_BAR * _share(progress))
    return "━" * done + "─" * (_BAR - done)
