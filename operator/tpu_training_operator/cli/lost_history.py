"""A history for a run whose worker was killed before it could leave one, from what the operator has heard of it."""

import json
from datetime import UTC, datetime

from tpu_training_operator.cli.job_file import JobFile
from tpu_training_operator.domain.objects.run_spec import run_spec
from tpu_training_operator.local.run import Outcome
from tpu_training_operator.report.history import SCHEMA


def lost_history(file: JobFile, outcome: Outcome) -> bytes:
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
