"""The progress file: the lines that worker 0 appends are the reports that local mode reads."""

import json
import math
from pathlib import Path

import pytest

from tpu_trainer.doctor.findings import Finding
from tpu_trainer.progress import Progress
from tpu_trainer.telemetry.history import Sample
from tpu_training_operator.local.progress import Evaluation, ProgressFollower, Report


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "progress.jsonl"


@pytest.fixture
def worker(file: Path) -> Progress:
    return Progress(total_steps=40, file=file, silent=False)


@pytest.fixture
def follower(file: Path) -> ProgressFollower:
    return ProgressFollower(file)


def trained(step: int, losses: tuple[float, ...] = (0.5,), examples_per_second: float | None = None) -> Sample:
    return Sample(step, losses, 0.1, seconds=1.0, split={}, examples_per_second=examples_per_second)


def steps(follower: ProgressFollower) -> list[int]:
    return [report.step for report in follower.new_reports()]


def test_every_phase_of_a_training_is_read(worker: Progress, follower: ProgressFollower) -> None:
    worker.starting("default/digits attempt 1")
    worker.sample(trained(20, (0.75, 0.5)))
    worker.sample(trained(40, (0.25,), 900.5))
    worker.evaluating(360)
    worker.done(checkpoint_step=40)
    assert follower.new_reports() == [
        Report("starting", 0, 40),
        Report("training", 20, 40, 0.5, (0.75, 0.5), None),
        Report("training", 40, 40, 0.25, (0.25,), 900.5),
        Report("evaluating", 40, 40, 0.25, (), 900.5),
        Report("done", 40, 40, 0.25, (), 900.5, checkpoint_step=40),
    ]


def test_an_evaluation_is_read_with_its_own_step(worker: Progress, follower: ProgressFollower) -> None:
    worker.sample(trained(20))
    worker.evaluated(25, {"accuracy": 0.75, "perplexity": math.inf})
    evaluation = Evaluation(25, {"accuracy": 0.75, "perplexity": None})
    assert follower.new_reports()[1:] == [Report("evaluating", 20, 40, 0.5, (), None, evaluation)]


def test_a_metric_called_step_does_not_take_the_steps_place(worker: Progress, follower: ProgressFollower) -> None:
    worker.evaluated(25, {"step": 0.5, "accuracy": 0.75})
    assert [report.evaluation for report in follower.new_reports()] == [Evaluation(25, {"accuracy": 0.75})]


def test_a_task_without_metrics_reports_no_evaluation(worker: Progress, follower: ProgressFollower) -> None:
    worker.evaluated(25, {})
    assert follower.new_reports() == []


def test_a_finding_is_read_as_a_warning_with_the_next_report(worker: Progress, follower: ProgressFollower) -> None:
    worker.finding(Finding("InputBound", 12, "waiting for data takes 40 % of the step"))
    worker.sample(trained(20))
    assert [report.warnings for report in follower.new_reports()] == [("waiting for data takes 40 % of the step",)]


def test_a_resumed_training_is_read_from_the_step_of_its_checkpoint(
    worker: Progress, follower: ProgressFollower
) -> None:
    worker.resumed(30, "resumed at step 30")
    assert follower.new_reports() == [Report("starting", 30, 40, checkpoint_step=30)]


def test_a_checkpoint_is_read_with_the_next_report(worker: Progress, follower: ProgressFollower) -> None:
    worker.checkpoint_step = 15
    worker.sample(trained(20))
    assert [(report.step, report.checkpoint_step) for report in follower.new_reports()] == [(20, 15)]


def test_a_report_is_read_once(worker: Progress, follower: ProgressFollower) -> None:
    worker.sample(trained(1))
    first = steps(follower)
    worker.sample(trained(2))
    assert [*first, *steps(follower), *steps(follower)] == [1, 2]


def test_nothing_is_reported_before_the_first_line(follower: ProgressFollower) -> None:
    assert follower.new_reports() == []


def test_a_half_written_line_is_read_when_it_is_whole(worker: Progress, follower: ProgressFollower, file: Path) -> None:
    worker.sample(trained(1))
    worker.sample(trained(2))
    whole = file.read_bytes()
    end_of_first = whole.index(b"\n") + 1
    read = []
    for written in range(len(whole) + 1):
        file.write_bytes(whole[:written])
        read.append(steps(follower))
    assert [(written, found) for written, found in enumerate(read) if found] == [(end_of_first, [1]), (len(whole), [2])]


def test_a_loss_that_is_no_number_is_reported_as_unknown(worker: Progress, follower: ProgressFollower) -> None:
    worker.sample(trained(2, (math.inf, math.nan), 10.0))
    assert follower.new_reports() == [Report("training", 2, 40, None, (None, None), 10.0)]


def test_people_are_told_the_same_in_plain_lines(
    worker: Progress, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker.starting("default/digits attempt 1")
    worker.sample(trained(20, (0.5,), 900.5))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["default/digits attempt 1", "step 20/40: loss 0.5, 900.5 examples/s"]
    assert [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()] == [0, 20]


@pytest.mark.parametrize(
    "line", ["half a thought", "[]", '{"step": 3}', '{"phase": "training", "step": "x", "totalSteps": 4}']
)
def test_a_line_of_somebody_elses_is_passed_over(
    line: str, file: Path, worker: Progress, follower: ProgressFollower
) -> None:
    worker.sample(trained(20))
    with file.open("a") as lines:
        lines.write(line + "\n")
    worker.sample(trained(40))
    assert steps(follower) == [20, 40]
