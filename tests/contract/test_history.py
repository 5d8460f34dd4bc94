"""The history file: the trainer writes what its schema allows, and it can be turned into a report page."""

import json
import math
from datetime import UTC, datetime
from importlib.resources import files

import pytest
from jsonschema import Draft202012Validator

from tests.contract.jobs import KINDS_OF_JOBS, stored_job
from tpu_contract.protocol import ExitCode, Phase
from tpu_contract.run_spec import parse_run_spec
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.reporting import history as trainer
from tpu_trainer.task.logbook import LoggedCurve
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.run_spec import run_spec
from tpu_training_operator.html_report.ending import ENDINGS
from tpu_training_operator.html_report.formatting import duration
from tpu_training_operator.html_report.history import parse_history
from tpu_training_operator.html_report.page import PHASES, render

SCHEMA = json.loads(files("tpu_contract").joinpath("history-v1.schema.json").read_text(encoding="utf-8"))
WRITTEN = datetime(2026, 11, 21, 16, 0, tzinfo=UTC)


NOISE = trainer.NoisePoint(4, 2, 64.0, -0.5)


def eventful() -> trainer.RunHistory:
    """Everything a run may record, with numbers that are not finite wherever they may occur."""
    history = trainer.RunHistory()
    split = {Phase.INPUT: 0.5, Phase.DEVICE: 1.5}
    history.add_sample(trainer.Sample(2, (0.75, math.nan), 0.1, 2.0, split, learning_rates={1: 0.05, 2: 0.1}))
    history.add_sample(trainer.Sample(4, (math.inf, 0.5), 0.1, 2.0, split, 80.0, 0.4, 32.0, noise=NOISE))
    history.add_evaluation(4, {"accuracy": 0.875, "perplexity": math.inf})
    history.add_curves([LoggedCurve("<b>accuracy", ((1, 0.25), (2, math.nan), (4, 0.625)))])
    history.add_finding(Finding("Padding", 1, "pad less"))
    return history


@pytest.mark.parametrize("changes", KINDS_OF_JOBS.values(), ids=KINDS_OF_JOBS.keys())
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "running"])
def test_what_a_trainer_writes_is_valid_and_becomes_a_page(changes: dict[str, object], ended: bool) -> None:
    job = stored_job(changes)
    spec = parse_run_spec(json.loads(json.dumps(run_spec(job, resolve(job.spec), attempt=2))))
    outcome = Outcome(ExitCode.Succeeded, "trained 4 steps", 4) if ended else None
    attempt = trainer.AttemptRecord(2, 2, 4, dict.fromkeys(Phase, 1.0), first_loss=trainer.FirstLossTime(41.0, 2, 12.5))
    recorded = eventful().as_recorded(attempt)
    document = trainer.dump_history(recorded, spec, outcome, {"torch": "2.9.0"}, WRITTEN)

    Draft202012Validator(SCHEMA).validate(json.loads(document))
    shown = parse_history(document)
    assert shown.written == WRITTEN
    assert shown.train_steps == spec.train_steps
    assert [point.mean for point in shown.losses] == [0.75, None, None, 0.5]
    assert [(each.step, each.rate) for each in shown.rates] == [(1, 0.05), (2, 0.1)]
    assert (shown.examples_per_second, shown.mfu) == (80.0, 0.4)
    assert [(one.step, one.count, one.noise, one.signal) for one in shown.noise] == [(4, 2, 64.0, -0.5)]
    page = render(shown)
    known = (job.name, "pad less", "0.875", "&lt;b&gt;accuracy", "0.625")
    assert all(words in page for words in (*known, "Succeeded" if ended else "Running"))
    assert f"It needed {duration(41.0)} until its first loss, {duration(12.5)} of it to compile 2 programs" in page


def test_the_page_has_words_for_every_phase_and_every_outcome() -> None:
    assert set(PHASES) == set(Phase)
    assert set(ENDINGS) == set(ExitCode.__members__)
