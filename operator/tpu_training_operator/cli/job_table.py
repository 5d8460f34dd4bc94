"""A job as one line among others. Pure. Used by `tpujob status` without a name."""

from typing import Any

from tpu_training_operator.cli.job_view import JobView
from tpu_training_operator.cli.words import duration
from tpu_training_operator.domain.observed import format_time

HEADER = ("NAMESPACE", "NAME", "STATE", "SLICE", "HOSTS", "ATTEMPT", "STEP", "LEFT", "RESTARTS", "GOODPUT", "AGE")


def table_row(view: JobView) -> tuple[str, ...]:
    progress, resolved = view.progress, view.resolved
    left = progress.estimated_remaining_seconds if progress and not view.is_over else None
    return (
        view.namespace,
        view.name,
        view.state_word or "-",
        view.slice or "-",
        str(resolved.hosts) if resolved else "-",
        str(view.status.attempt),
        f"{progress.step}/{progress.total_steps}" if progress else "-",
        duration(left) if left is not None else "-",
        str(sum(view.status.restarts.by_class.values())),
        (view.goodput and view.goodput.ratio) or "-",
        duration((view.now - view.created).total_seconds()),
    )


def json_entry(view: JobView) -> dict[str, Any]:
    progress, resolved = view.progress, view.resolved
    return {
        "name": view.name,
        "namespace": view.namespace,
        "state": view.state_word or None,
        "slice": view.slice or None,
        "hosts": resolved.hosts if resolved else None,
        "attempt": view.status.attempt,
        "step": progress.step if progress else None,
        "totalSteps": progress.total_steps if progress else None,
        "restarts": dict(view.status.restarts.by_class),
        "goodput": view.goodput.ratio if view.goodput else None,
        "creationTime": format_time(view.created),
    }
