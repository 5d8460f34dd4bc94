"""What a worker says on the way, as the planner reads it: our own form and Kubeflow Trainer's."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.status import BestCheckpoint, Progress
from tpu_training_operator.domain.cluster_state.worker_reports import WorkerReport
from tpu_training_operator.runtime.progress import payload
from tpu_training_operator.runtime.progress.payload import read_progress, read_trainer_status
from tpu_training_operator.runtime.progress.tokens import ReportRefused, Sender

NOW = datetime(2026, 1, 15, 12, tzinfo=UTC)
SENDER = Sender("digits", attempt=2, pod_uid="uid-of-the-pod", total_steps=300)
LEAST = {"phase": "Training", "step": 7}


def progress(**said: Any) -> WorkerReport:
    return read_progress(json.dumps(LEAST | said).encode(), SENDER, NOW)


def trainer_status(sender: Sender = SENDER, /, **status: Any) -> WorkerReport:
    return read_trainer_status(json.dumps({"trainerStatus": status}).encode(), sender, NOW)


def metrics(**values: Any) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def refusal(read: Any, body: bytes) -> str:
    with pytest.raises(ReportRefused) as refused:
        read(body, SENDER, NOW)
    assert refused.value.status == 400
    return str(refused.value)


# Our own


def test_the_phases_of_a_start_are_read_without_those_that_only_a_newer_trainer_has() -> None:
    assert progress(startSeconds={"imports": 4.5, "compiled": 0, "dreaming": 3}).start_seconds == {
        "imports": 4.5,
        "compiled": 0,
    }
    assert progress().start_seconds == {}
    for wrong in ({"imports": -1}, {"imports": "4"}, [4.5], {"imports": 1e300}):
        assert "startSeconds" in refusal(read_progress, json.dumps(LEAST | {"startSeconds": wrong}).encode())


def test_a_whole_report_is_read() -> None:
    said = progress(
        phase="Checkpointing",
        step=20,
        totalSteps=300,
        startStep=10,
        packagesSha256="0a" * 32,
        loss=0.0123456789,
        examplesPerSecond=1234.56789,
        checkpointStep=15,
        bestCheckpoint={"name": "step-00000015-4d5f-1", "step": 15, "metric": "accuracy", "value": 0.9123456},
        metrics={"accuracy": 0.975, "epoch": 2},
        warnings=["waiting for data takes 40 % of the step"],
        estimatedRemainingSeconds=61,
        stacks="Thread 1: ...",
    )
    assert said == WorkerReport(
        attempt=2,
        pod_uid="uid-of-the-pod",
        received=NOW,
        phase=ReportPhase.CHECKPOINTING,
        step=20,
        total_steps=300,
        start_step=10,
        examples_per_second="1234.57",
        loss="0.0123457",
        metrics={"accuracy": "0.975", "epoch": "2"},
        checkpoint_step=15,
        best_checkpoint=BestCheckpoint(name="step-00000015-4d5f-1", step=15, metric="accuracy", value="0.912346"),
        estimated_remaining_seconds=61,
        warnings=("waiting for data takes 40 % of the step",),
        stacks="Thread 1: ...",
        packages_sha256="0a" * 32,
    )


def test_phase_and_step_are_enough() -> None:
    least = WorkerReport(
        attempt=2, pod_uid="uid-of-the-pod", received=NOW, phase=ReportPhase.TRAINING, step=7, metrics={}
    )
    assert progress() == least
    nothing = dict.fromkeys(("totalSteps", "loss", "metrics", "warnings", "stacks", "checkpointStep", "bestCheckpoint"))
    assert progress(**nothing) == least


@pytest.mark.parametrize("phase", list(ReportPhase))
def test_every_phase_is_read(phase: ReportPhase) -> None:
    assert progress(phase=phase.value).phase is phase


def test_the_payload_cannot_say_who_the_sender_is() -> None:
    assert progress(attempt=9, podUid="another", received="2020-01-01T00:00:00Z") == progress()


def test_a_field_of_a_newer_trainer_is_ignored() -> None:
    assert progress(chipTemperature={"mean": 61.5}) == progress()


@pytest.mark.parametrize(("loss", "shown"), [("NaN", "nan"), ("-Infinity", "-inf"), ("1e999", "inf"), ("null", None)])
def test_a_loss_that_is_not_finite_is_shown_as_such(loss: str, shown: str | None) -> None:
    body = b'{"phase": "Training", "step": 7, "loss": %s}' % loss.encode()
    assert read_progress(body, SENDER, NOW).loss == shown


WRONG = {
    "not json": (b"step 7", "invalid JSON"),
    "cut off": (b'{"phase": "Training", "st', "invalid JSON"),
    "nested without end": (b'{"metrics": ' + b"[" * 60_000, "recursion limit"),
    "no text": (b"\xff\xfe", "invalid JSON"),
    "half a character": (rb'{"phase": "Training", "step": 7, "warnings": ["\ud800"]}', "invalid JSON"),
    "empty": (b"", "invalid JSON"),
    "a list": (b"[]", "should be an object"),
    "nothing said": (b"{}", "phase: field required; step: field required"),
    "no such phase": (b'{"phase": "training", "step": 7}', "phase: input should be 'Starting', 'Training'"),
    "a step as text": (b'{"phase": "Training", "step": "7"}', "step: input should be a valid integer"),
    "a step between two": (b'{"phase": "Training", "step": 7.5}', "step: input should be a valid integer"),
    "a step that is a flag": (b'{"phase": "Training", "step": true}', "step: input should be a valid integer"),
    "a step below zero": (b'{"phase": "Training", "step": -1}', "step: input should be greater than or equal to 0"),
    "a step that is too large": (b'{"phase": "Training", "step": %d}' % 10**400, "step: input should be less than"),
    "a loss as text": (b'{"phase": "Training", "step": 7, "loss": "0.5"}', "loss: input should be a valid number"),
    "a metric as text": (
        b'{"phase": "Training", "step": 7, "metrics": {"accuracy": "0.9"}}',
        "metrics.accuracy: input should be a valid number",
    ),
    "a warning that is none": (
        b'{"phase": "Training", "step": 7, "warnings": ["a", 3]}',
        "warnings.1: input should be a valid string",
    ),
}


@pytest.mark.parametrize(("body", "why"), WRONG.values(), ids=WRONG.keys())
def test_a_refusal_names_the_wrong_field(body: bytes, why: str) -> None:
    assert why in refusal(read_progress, body)


def test_a_refusal_stays_short_however_much_is_wrong() -> None:
    body = json.dumps(LEAST | {"metrics": {"m" * 5000 + str(number): "x" for number in range(10)}}).encode()
    assert len(refusal(read_progress, body)) < 3000


# Too much


def test_as_many_metrics_are_kept_as_a_status_can_hold() -> None:
    found = progress(metrics={f"class-{number}": number for number in range(100)}).metrics
    assert found is not None
    assert list(found) == [f"class-{number}" for number in range(64)]


def test_metrics_without_a_value_or_with_a_very_long_name_are_dropped() -> None:
    unknown = {f"unknown-{number}": None for number in range(100)}
    assert progress(metrics=unknown | {"m" * 129: 1, "m" * 128: 2}).metrics == {"m" * 128: "2"}


def test_the_latest_warnings_are_kept_and_truncated() -> None:
    found = progress(warnings=[f"{number} " + "w" * 2000 for number in range(30)]).warnings
    assert [text.split()[0] for text in found] == [str(number) for number in range(10, 30)]
    assert {len(text) for text in found} == {1024}


def test_the_end_of_long_stacks_is_kept() -> None:
    found = progress(stacks="a" * 50_000 + "the last frame").stacks
    assert (len(found), found[-14:]) == (16 * 1024, "the last frame")


def test_what_is_kept_fits_into_a_status() -> None:
    said = progress(
        metrics={f"{number:0128}": -1.23456e-300 for number in range(100)}, warnings=["w" * 2000] * 30, loss=-1e-300
    )
    assert Progress(
        step=said.step, total_steps=300, metrics=dict(said.metrics or {}), warnings=list(said.warnings), loss=said.loss
    )


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
_NAMES = ("step", "totalSteps", "loss", "examplesPerSecond", "checkpointStep", "metrics", "warnings", "stacks")
_FIELDS = dict.fromkeys(_NAMES, _JSON)
_PHASES = st.sampled_from([phase.value for phase in ReportPhase]) | _JSON


@given(said=st.fixed_dictionaries({"phase": _PHASES}, optional=_FIELDS))
def test_any_json_is_a_report_or_is_refused(said: dict[str, Any]) -> None:
    try:
        found = read_progress(json.dumps(said).encode(), SENDER, NOW)
    except ReportRefused:
        return
    assert 0 <= found.step <= 2**53


@given(body=st.binary())
def test_bytes_at_random_are_refused(body: bytes) -> None:
    for read in (read_progress, read_trainer_status):
        assert refusal(read, body)


# Kubeflow Trainer's


def test_the_example_of_kep_2779_is_read() -> None:
    said = trainer_status(
        progressPercentage=45,
        estimatedRemainingSeconds=795649,
        metrics=metrics(loss="0.2347", eval_loss="0.2451", accuracy="0.9876", currentEpoch="2", totalEpochs="5"),
        lastUpdatedTime="2025-01-23T10:30:45Z",
    )
    assert said == WorkerReport(
        attempt=2,
        pod_uid="uid-of-the-pod",
        received=NOW,
        phase=ReportPhase.TRAINING,
        step=135,
        total_steps=300,
        loss="0.2347",
        metrics={
            "loss": "0.2347",
            "eval_loss": "0.2451",
            "accuracy": "0.9876",
            "currentEpoch": "2",
            "totalEpochs": "5",
        },
        estimated_remaining_seconds=795649,
        exact=False,
    )


def test_a_step_among_the_metrics_is_more_exact_than_a_percentage() -> None:
    said = trainer_status(
        progressPercentage=12, metrics=metrics(loss=0.5, current_step=61, total_steps=500, current_epoch=0.98)
    )
    assert (said.step, said.total_steps, said.metrics) == (61, 500, {"loss": "0.5", "current_epoch": "0.98"})


@pytest.mark.parametrize("name", payload._STEP_METRICS)
def test_the_step_metric_has_many_names(name: str) -> None:
    assert trainer_status(metrics=metrics(**{name: 61})).step == 61


def test_only_a_step_from_a_metric_is_exact() -> None:
    """A percentage moves every few hours in a long training, and says nothing of a step that hangs."""
    assert trainer_status(metrics=metrics(step=61)).exact
    assert not trainer_status(progressPercentage=12).exact


@pytest.mark.parametrize("value", ["many", "", "nan", "inf", "-3", "1e400"])
def test_the_percentage_counts_if_the_step_metric_is_not_a_count(value: str) -> None:
    assert trainer_status(progressPercentage=10, metrics=metrics(step=value)).step == 30


@pytest.mark.parametrize(
    ("percentage", "phase"), [(0, ReportPhase.STARTING), (1, ReportPhase.TRAINING), (100, ReportPhase.DONE)]
)
def test_the_phase_follows_from_the_percentage(percentage: int, phase: ReportPhase) -> None:
    assert trainer_status(progressPercentage=percentage).phase is phase


def test_at_the_end_the_step_is_the_last_one() -> None:
    """Hugging Face's callback names no step in its last report."""
    assert trainer_status(progressPercentage=100, estimatedRemainingSeconds=0, metrics=metrics(loss=0.1)).step == 300


def test_metrics_that_are_not_numbers_are_dropped() -> None:
    said = trainer_status(
        progressPercentage=1, metrics=metrics(loss="0.50000001", lr="5e-05", note="fine", worst="nan")
    )
    assert (said.loss, said.metrics) == ("0.5", {"loss": "0.5", "lr": "5e-05", "worst": "nan"})


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({}, "metric named current_step"),
        ({"metrics": metrics(loss=0.5)}, "metric named current_step"),
        ({"progressPercentage": 101}, "progressPercentage: "),
        ({"progressPercentage": 1, "metrics": [{"name": "loss", "value": 0.5}]}, "metrics.0.value: "),
        ({"progressPercentage": 1, "metrics": {"loss": "0.5"}}, "trainerStatus.metrics: "),
    ],
)
def test_a_status_without_progress_or_of_another_form_is_refused(status: dict[str, Any], why: str) -> None:
    assert why in refusal(read_trainer_status, json.dumps({"trainerStatus": status}).encode())


def test_a_percentage_of_an_unknown_number_of_steps_is_refused() -> None:
    with pytest.raises(ReportRefused, match="a metric named current_step"):
        trainer_status(Sender("digits", 1, "uid", total_steps=None), progressPercentage=50)


def test_without_a_trainer_status_nothing_is_reported() -> None:
    assert refusal(read_trainer_status, b"{}") == "trainerStatus: field required"
