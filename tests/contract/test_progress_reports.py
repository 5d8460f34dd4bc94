"""Reports over HTTPS: the operator reads what the trainer sends, at the paths and with the files that it configures."""

import re
from datetime import UTC, datetime
from urllib.parse import urlsplit

from hypothesis import given
from hypothesis import strategies as st

from tests.contract.jobs import stored_job
from tests.contract.pods import ATTEMPT, REPORTING, worker_environments
from tpu_contract import protocol
from tpu_contract.protocol import ReportPhase
from tpu_trainer.contract.environment import ProgressEndpoint, read_environment
from tpu_trainer.contract.outcome import Best
from tpu_trainer.reporting import report
from tpu_training_operator.api import status
from tpu_training_operator.api.words import number_text
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.runtime.progress import payload, server
from tpu_training_operator.runtime.progress.tokens import Sender

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SENDER = Sender(job="digits", pod_uid="4d5f", attempt=ATTEMPT, total_steps=300)
OWN_LOOP = {"trainer.entrypoint": ..., "trainer.command": ["python", "train.py"]}

numbers = st.floats()
steps = st.integers(0, 300)
reports = st.builds(
    report.ProgressReport,
    phase=st.sampled_from(protocol.ReportPhase),
    step=steps,
    total_steps=st.just(300),
    loss=st.none() | numbers,
    examples_per_second=st.none() | numbers,
    start_step=st.none() | steps,
    checkpoint_step=st.none() | steps,
    # A job names the metric, in at most 128 characters.
    best_checkpoint=st.none() | st.builds(Best, st.just("step-00000010-5f0c-1"), steps, st.text(max_size=128), numbers),
    metrics=st.dictionaries(
        st.text(max_size=16) | st.sampled_from(["loss", "step", "current_step"]),
        numbers,
        max_size=protocol.MOST_METRICS,
    ),
    warnings=st.lists(st.text(max_size=32), max_size=protocol.MOST_WARNINGS).map(tuple),
    remaining_seconds=st.none() | st.integers(0, 10**9),
    stacks=st.none() | st.text(st.characters(codec="utf-8"), min_size=1),
)


def as_sent(text: str) -> str:
    """A lone surrogate has no UTF-8 form."""
    return text.encode("utf-8", "replace").decode()


def meant(best: Best) -> status.BestCheckpoint:
    value = number_text(best.value)
    return status.BestCheckpoint(name=best.name, step=best.step, metric=as_sent(best.metric), value=value)


@given(reports)
def test_every_part_of_a_report_arrives(sent: report.ProgressReport) -> None:
    assert payload.read_progress(report.operator_body(sent), SENDER, NOW) == WorkerReport(
        attempt=ATTEMPT,
        pod_uid="4d5f",
        received=NOW,
        phase=ReportPhase(sent.phase),
        step=sent.step,
        total_steps=300,
        examples_per_second=number_text(sent.examples_per_second),
        loss=number_text(sent.loss),
        metrics={as_sent(name): number_text(value) for name, value in sent.metrics.items()},
        start_step=sent.start_step,
        checkpoint_step=sent.checkpoint_step,
        best_checkpoint=sent.best_checkpoint and meant(sent.best_checkpoint),
        estimated_remaining_seconds=sent.remaining_seconds,
        warnings=tuple(as_sent(warning) for warning in sent.warnings),
        stacks=sent.stacks,
    )


def test_a_loss_that_is_not_a_number_is_shown_as_such() -> None:
    sent = report.ProgressReport(
        protocol.ReportPhase.TRAINING, 3, 300, loss=float("nan"), metrics={"accuracy": float("inf")}
    )
    read = payload.read_progress(report.operator_body(sent), SENDER, NOW)
    assert (read.loss, read.metrics) == ("nan", {"accuracy": "inf"})


@given(reports)
def test_the_step_and_the_end_arrive_in_kubeflow_trainers_form_too(sent: report.ProgressReport) -> None:
    read = payload.read_trainer_status(report.kubeflow_body(sent, NOW), SENDER, NOW)
    assert (read.step, read.total_steps) == (sent.step, 300)
    assert (read.phase is ReportPhase.DONE) == (sent.phase is protocol.ReportPhase.DONE)


def test_reports_go_to_the_paths_that_the_operator_serves() -> None:
    (first, *_) = worker_environments(stored_job(), REPORTING)
    for name, path in (
        ("TPUJOB_PROGRESS_URL", server.PROGRESS_PATH),
        ("KUBEFLOW_TRAINER_SERVER_URL", server.TRAINER_STATUS_PATH),
    ):
        assert first[name] == REPORTING.url + path.format(namespace="default", name="digits")
        assert re.fullmatch(r"/[a-z0-9./-]+", urlsplit(first[name]).path)


def test_the_trainer_reports_to_its_own_operator() -> None:
    first, second, *_ = (read_environment(environ) for environ in worker_environments(stored_job(), REPORTING))
    assert isinstance(first.progress_service, ProgressEndpoint)
    assert not first.progress_service.kubeflow
    assert second.progress_service is None
