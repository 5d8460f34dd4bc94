"""`tpujob status NAME` in words: what the job does and why, what failed, what is left of the budgets, where the time
went, what to do next. Pure."""

from typing import Any

from tpu_training_operator.api.status import Failure
from tpu_training_operator.cli.advice import advice
from tpu_training_operator.cli.job_rows import (
    SPENT_NOW,
    Row,
    hosts_rows,
    progress_rows,
    spent,
    state_style,
    warning_rows,
    why,
)
from tpu_training_operator.cli.job_view import JobView
from tpu_training_operator.cli.words import ago, duration, several
from tpu_training_operator.domain.failures.failure_words import failed_where, failed_why
from tpu_training_operator.domain.lifecycle.restart_budget import Budget
from tpu_training_operator.domain.observed import format_time, parse_time
from tpu_training_operator.domain.words import count

_MOST_NODES = 8


def report_rows(view: JobView, command: str) -> list[Row]:
    return [
        *_what_rows(view),
        *hosts_rows(view),
        *progress_rows(view, bar=False),
        *warning_rows(view),
        *_failures_rows(view),
        *_budget_rows(view),
        *_node_rows(view),
        *_time_rows(view),
        *(Row("to do" if index == 0 else "", sentence, "bold") for index, sentence in enumerate(advice(view, command))),
    ]


def as_json(view: JobView, raw_status: dict[str, Any], command: str) -> dict[str, Any]:
    """The status as the operator wrote it, and what is computed here from it, the pods and the clock."""
    hosts, goodput = view.hosts, view.goodput
    return {
        "name": view.name,
        "namespace": view.namespace,
        "time": format_time(view.now),
        "status": raw_status,
        "hosts": hosts
        and {
            "total": hosts.total,
            "ready": hosts.ready,
            "finished": hosts.finished,
            "notReady": [{"why": group.why, "hosts": list(group.places)} for group in hosts.others],
        },
        "budgets": {
            budget.failure_class: {"restarts": budget.total, "counting": budget.counting, "limit": budget.limit}
            for budget in view.budgets
        },
        "goodputNow": goodput and goodput.as_json(),
        "toDo": advice(view, command),
    }


def _what_rows(view: JobView) -> list[Row]:
    rows = [Row("" if index else "why", line, state_style(view)) for index, line in enumerate(why(view).splitlines())]
    if (resolved := view.resolved) is not None:
        rehearsal = ", rehearsed on CPU" if view.is_rehearsal else ""
        where = (count(resolved.hosts, "host"), count(resolved.chips, "chip"), count(resolved.replicas, "replica"))
        rows.append(Row("slice", f"{view.slice} ({resolved.topology}): {', '.join(where)}{rehearsal}"))
        batch = f"global batch {resolved.global_batch_size}, {resolved.per_replica_batch_size} per replica"
        rows.append(Row("recipe", f"{batch}; {resolved.train_steps} steps; learning rate {resolved.learning_rate}"))
    return rows


def _failures_rows(view: JobView) -> list[Row]:
    first, last = view.status.first_failure, view.status.last_failure
    rows = []
    if last is not None:
        rows += _failure_rows("failure", last, view)
    if first is not None and first != last:
        rows += _failure_rows("first one", first, view)
    return rows


def _failure_rows(label: str, failure: Failure, view: JobView) -> list[Row]:
    when = f"{ago(parse_time(failure.time), view.now)}, attempt {failure.attempt}"
    rows = [Row(label, f"{failed_why(failure)}: {failed_where(failure)}, pod {failure.pod}, {when}")]
    rows += [Row("", line) for line in failure.message.splitlines()]
    return [*rows, Row("", _done_about(failure, view))]


def _done_about(failure: Failure, view: JobView) -> str:
    if view.status.attempt > failure.attempt:
        return f"The gang was restarted as attempt {failure.attempt + 1}."
    return "The job has failed for good." if view.has_failed else "The gang is to be restarted."


def _budget_rows(view: JobView) -> list[Row]:
    used = [budget for budget in view.budgets if budget.total]
    if not used:
        return []
    lines = [f"{budget.failure_class:<15}{budget.total:>4}   {_left(budget, view.window)}" for budget in used]
    return [Row("restarts" if index == 0 else "", line) for index, line in enumerate(lines)]


def _left(budget: Budget, window: str) -> str:
    if budget.limit is None:
        return "no limit"
    return f"{budget.left} of {budget.limit} left ({budget.counting} count: within {window}, no checkpoint since)"


def _node_rows(view: JobView) -> list[Row]:
    rows = []
    if faults := view.status.device_faults:
        nodes = [f"{fault.node} ({ago(parse_time(fault.time), view.now)})" for fault in faults]
        rows.append(Row("faults", f"of chips on {several(nodes, _MOST_NODES)}"))
    if avoided := view.status.avoided_nodes:
        rows.append(Row("avoided", several(avoided, _MOST_NODES)))
    return rows


def _time_rows(view: JobView) -> list[Row]:
    """The parts and their sum: every second of the job's life is somewhere."""
    goodput = view.goodput
    if goodput is None:
        return []
    now = SPENT_NOW.get(goodput.activity)
    lines = [
        f"{name:<11}{duration(seconds):>8}{_percent(seconds, view.life):>6}{'   <- now' if name == now else ''}"
        for name, seconds in spent(goodput).items()
        if seconds or name == now
    ]
    lines.append(f"{'together':<11}{duration(view.life):>8}   since {view.created:%Y-%m-%d %H:%M:%S} UTC")
    if goodput.ratio is not None and goodput.productive_seconds:
        lines.append(f"{'goodput':<11}{goodput.ratio:>8}   productive, of all that was not suspended")
    return [Row("time" if index == 0 else "", line) for index, line in enumerate(lines)]


def _percent(seconds: int, life: int) -> str:
    return f"{100 * seconds / life:.0f} %" if life else ""
