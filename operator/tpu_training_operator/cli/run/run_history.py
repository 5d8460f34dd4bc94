"""The history that a local run's page is made from: the worker's own, or, if it left none, what was heard of it."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tpu_training_operator.cli.common.errors import BadInput
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.cli.run.report import is_uri, read_history
from tpu_training_operator.domain.objects.run_spec import run_spec
from tpu_training_operator.html_report.history import SCHEMA, UnreadableHistory, parse_history
from tpu_training_operator.local.run import Outcome


def run_history(file: JobFile, outcome: Outcome, directory: Path) -> tuple[bytes, str] | None:
    """The file, and the place it is from. None if there is no page to make: a loop of the user's own need not leave a
    history, and a job that never began has none."""
    own, report = str(directory), file.job.spec.report
    place = report.uri if report is not None and report.uri else own
    try:
        document = read_history(place)
        if place == own or _is_of(document, datetime.now(UTC) - timedelta(seconds=outcome.seconds)):
            return document, place
    except BadInput as error:
        if is_uri(place):
            error.show()
    if file.job.spec.trainer.entrypoint is None or not outcome.status.attempt:
        return None
    return lost_history(file, outcome), place


def lost_history(file: JobFile, outcome: Outcome) -> bytes:
    """Of a run whose worker was killed before it could leave one: what the operator has heard."""
    status, losses = outcome.status, outcome.curves.losses
    number = max(1, status.attempt)
    told = status.progress.step if status.progress else 0
    attempt = {"number": number, "first": 0, "last": max(told, *losses, 0), "split": {}}
    points = [
        {"step": step, "count": 1, "mean": loss, "low": loss, "high": loss, "broken": int(loss is None)}
        for step, loss in losses.items()
    ]
    document = {
        "schema": SCHEMA,
        "runSpec": run_spec(file.job, file.resolution, number),
        "written": datetime.now(UTC).isoformat(),
        "recorded": {"attempts": [attempt], "losses": points},
    }
    return json.dumps(document).encode()


def _is_of(document: bytes, begun: datetime) -> bool:
    """Whether it was written since then: a place for reports may hold an earlier run's. An unreadable one is reported
    when the page is made."""
    try:
        return parse_history(document).written >= begun
    except UnreadableHistory:
        return True
