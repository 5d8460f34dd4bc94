"""What a local run's page is made from: the worker's history, wherever it is, or else what was heard of the run."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.jobs import job_body
from tests.unit.histories import document, losses_of
from tests.unit.hostile_texts import HOSTILE, obeyed
from tpu_training_operator.api.status import Progress, Status
from tpu_training_operator.cli.common.job_file import JobFile, load
from tpu_training_operator.cli.run.report import run_history
from tpu_training_operator.cli.run.run import curves_of
from tpu_training_operator.html_report.history import parse_history
from tpu_training_operator.local.run import RunOutcome


def job(directory: Path, **changes: Any) -> JobFile:
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(changes)))
    return load(file)


def outcome(losses: dict[int, float | None], step: int = 0, attempt: int = 2, seconds: float = 60.0) -> RunOutcome:
    status = Status(attempt=attempt, progress=Progress(step=step, total_steps=80) if step else None)
    return RunOutcome(status, losses, (), cancelled=False, seconds=seconds, pods_directory=Path("pods"))


def test_a_worker_that_was_killed_leaves_what_was_heard_of_it(tmp_path: Path) -> None:
    file = job(tmp_path)
    found = run_history(file, outcome({1: 2.5, 2: None}, step=7), tmp_path)
    history = parse_history(found[0])
    assert [(point.step, point.mean, point.broken) for point in history.losses] == [(1, 2.5, 0), (2, None, 1)]
    (attempt,) = history.attempts
    assert (attempt.number, attempt.last, history.outcome) == (2, 7, None)
    assert history.entrypoint == "examples.digits:task"
    assert history.scaling


OWN_LOOP = {"trainer.entrypoint": ..., "trainer.command": ["python", "train.py"]}


@pytest.mark.parametrize(("changes", "attempt"), [(OWN_LOOP, 1), ({}, 0)], ids=["own loop", "never began"])
def test_without_a_worker_of_ours_there_is_no_page(tmp_path: Path, changes: dict[str, Any], attempt: int) -> None:
    assert run_history(job(tmp_path, **changes), outcome({}, attempt=attempt), tmp_path) is None


@pytest.mark.parametrize("age", [5, 500])
def test_the_place_for_reports_is_looked_at_and_an_earlier_runs_history_is_not_taken(tmp_path: Path, age: int) -> None:
    place = tmp_path / "reports"
    place.mkdir()
    written = (datetime.now(UTC) - timedelta(seconds=age)).isoformat().encode()
    (place / "history.json").write_bytes(document().replace(b"2026-11-21T16:00:00+00:00", written))
    file = job(tmp_path, **{"report.uri": str(place)})
    found = run_history(file, outcome({}), tmp_path)
    assert found[1] == str(place)
    assert parse_history(found[0]).name == ("small" if age < 60 else file.job.name)


def test_the_curves_are_the_historys_with_plain_names_and_else_those_that_the_status_has_shown() -> None:
    evaluations = [{"step": 2, "metrics": {HOSTILE: 0.5, "worst": math.inf, "step": 7.0}}]
    recorded = {"losses": losses_of([0.5, math.nan]), "evaluations": evaluations}
    losses, (evaluation,) = curves_of(outcome({1: 9.0}), (document(recorded), "here"))
    assert (losses, evaluation["worst"], evaluation["step"]) == ({1: 0.5, 2: None}, None, 2)
    assert obeyed(str(evaluation)) == []
    for nothing in (None, (document(), "here"), (b"[]", "here")):
        assert curves_of(outcome({1: 9.0}), nothing) == ({1: 9.0}, [])
