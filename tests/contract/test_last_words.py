"""The termination message: the operator copies into the status what the trainer writes last."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.pods import ended_pod
from tpu_contract.protocol import Check, ExitCode
from tpu_trainer.contract.findings import Finding
from tpu_trainer.contract.outcome import Best, Outcome, termination_message, write_last_words
from tpu_trainer.reporting.loss_trend import LossTrend
from tpu_trainer.reporting.rung import RungNumbers
from tpu_training_operator.api.status import BestCheckpoint, Progress
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.job import trainer_report
from tpu_training_operator.domain.plan.common.completion import read_final_progress

TOTAL = 300


def pod_after(outcome: Outcome) -> WorkerPod:
    return ended_pod(outcome.code, termination_message(outcome).decode())


def test_the_status_has_the_trainers_final_report(tmp_path: Path) -> None:
    file = tmp_path / "termination-log"
    best = Best("step-00000240-5f0c-1", 240, "accuracy", 0.99)
    metrics = {"loss": 1 / 81, "accuracy": 0.981}
    write_last_words(
        Outcome(ExitCode.Succeeded, "trained", 300, metrics, 1234.5678, best.as_json()), first=True, path=str(file)
    )
    assert read_final_progress(ended_pod(0, file.read_text(encoding="utf-8")), TOTAL, None) == Progress(
        step=300,
        total_steps=TOTAL,
        examples_per_second="1234.57",
        loss="0.0123457",
        metrics={"loss": "0.0123457", "accuracy": "0.981"},
        best_checkpoint=BestCheckpoint(name="step-00000240-5f0c-1", step=240, metric="accuracy", value="0.99"),
    )


@pytest.mark.parametrize("wrong", [None, [], {}, {"name": "a", "step": -1, "metric": "b", "value": 1}, {"name": 1}])
def test_a_best_checkpoint_that_the_trainer_cannot_have_written_is_left_out(wrong: object) -> None:
    said = json.dumps({"outcome": "Succeeded", "message": "trained", "step": 300, "bestCheckpoint": wrong})
    assert read_final_progress(ended_pod(0, said), TOTAL, None).best_checkpoint is None


@pytest.mark.parametrize("code", list(ExitCode), ids=lambda code: code.name)
def test_the_message_of_every_outcome_is_read(code: ExitCode) -> None:
    assert pod_after(Outcome(code, 'line 1\n  "line 2"')).last_words == 'line 1\n  "line 2"'


@given(
    message=st.text(max_size=200),
    step=st.none() | st.integers(0, 2**53),
    # Of two names that differ in control characters only, either may be kept.
    metrics=st.dictionaries(st.text(max_size=10), st.floats(), max_size=10).filter(
        lambda metrics: len({*map(plain, metrics)}) == len(metrics)
    ),
    rate=st.none() | st.floats(0, 1e12),
)
def test_any_outcome_is_read(message: str, step: int | None, metrics: dict[str, float], rate: float | None) -> None:
    pod = pod_after(Outcome(ExitCode.UserError, message, step, metrics, rate))
    assert pod.last_words == plain(message)
    progress = read_final_progress(pod, TOTAL, None)
    if step is None:
        assert progress is None
        return
    assert progress.step == step
    assert progress.metrics == {plain(name): f"{value:.6g}" for name, value in metrics.items() if math.isfinite(value)}
    assert (progress.examples_per_second is None) == (rate is None)


def test_the_gates_read_what_a_rung_measured() -> None:
    numbers, losses = RungNumbers(), LossTrend(warm_up=0)
    losses.add([4.0, 2.0, 3.0, 2.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0])
    numbers.add_finding(Finding(Check.HOST_SYNC, 3, "seen"))
    rung = numbers.as_json(losses, recompilations=1, not_finite=2, batch=32, rate=12.5)
    pod = pod_after(Outcome(ExitCode.Succeeded, "trained", 4, {"loss": 1.0, "f1": 0.5}, 12.5, rung=rung))
    words = pod.trainer_message
    assert (words.step, words.rate, words.metrics) == (4, 12.5, {"loss": 1.0, "f1": 0.5})
    assert words.rung == trainer_report.ReportedRung(
        steps=10,
        examples_per_second=12.5,
        first_loss=3.0,
        first_error=(4 / 12) ** 0.5,
        last_loss=9.0,
        last_error=0.0,
        averaged=3,
        errors_fallen=losses.errors_fallen,
        curve=trainer_report.ReportedCurve(
            steps=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            losses=[4.0, 2.0, 3.0, 2.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0],
            errors=[1.0] * 10,
        ),
        rise=trainer_report.ReportedRise(start=2.0, peak=9.0, step=8),
        recompilations=1,
        not_finite=2,
        findings={"HostSync": 1},
    )
