"""The progress file: local mode reads curves from the lines that worker 0 appends."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.unit.hostile_texts import HOSTILE, obeyed
from tpu_trainer.reporting.history import Sample
from tpu_trainer.reporting.progress import ProgressLog
from tpu_training_operator.local.curves import Curves, read_curves


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "progress.jsonl"


@pytest.fixture
def worker(file: Path) -> ProgressLog:
    return ProgressLog(total_steps=40, file=file, silent=False)


def trained(step: int, losses: tuple[float, ...] = (0.5,), examples_per_second: float | None = None) -> Sample:
    return Sample(step, losses, 0.1, seconds=1.0, split={}, examples_per_second=examples_per_second)


def test_every_loss_is_read_with_its_step_and_the_newest_step_that_is_safe(worker: ProgressLog, file: Path) -> None:
    worker.start("default/digits attempt 1")
    worker.add_sample(trained(19, (0.75, 0.5)))
    worker.add_sample(trained(20, (0.25,), 900.5))
    worker.begin_evaluation(360)
    worker.finish(checkpoint_step=20)
    assert read_curves([file]) == Curves(losses={18: 0.75, 19: 0.5, 20: 0.25}, checkpoint_step=20)


def test_an_evaluation_is_read_with_its_own_step(worker: ProgressLog, file: Path) -> None:
    worker.add_sample(trained(20))
    worker.add_evaluation(25, {"accuracy": 0.75, "perplexity": math.inf})
    assert read_curves([file]).evaluations == {25: {"accuracy": 0.75, "perplexity": None}}


def test_a_metric_called_step_does_not_replace_the_step(worker: ProgressLog, file: Path) -> None:
    worker.add_evaluation(25, {"step": 0.5, "accuracy": 0.75})
    assert read_curves([file]).evaluations == {25: {"accuracy": 0.75}}


def test_the_last_attempt_that_reached_a_step_counts(tmp_path: Path) -> None:
    files = [tmp_path / f"attempt-{number}.jsonl" for number in (1, 2, 3)]
    ProgressLog(40, files[0], silent=False).add_sample(trained(3, (9.0, 8.0, 7.0)))
    ProgressLog(40, files[2], silent=False).add_sample(trained(2, (1.0, 0.5)))
    assert read_curves(files).losses == {1: 1.0, 2: 0.5, 3: 7.0}


def test_a_loss_that_is_not_finite_is_none(worker: ProgressLog, file: Path) -> None:
    worker.add_sample(trained(2, (math.inf, math.nan), 10.0))
    assert read_curves([file]).losses == {1: None, 2: None}


def test_the_log_has_the_same_values_in_plain_lines(
    worker: ProgressLog, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker.start("default/digits attempt 1")
    worker.add_sample(trained(20, (0.5,), 900.5))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "default/digits attempt 1"
    assert re.findall(r"[\d.]+", lines[1]) == ["20", "40", "0.5", "900.5"]
    assert [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()] == [0, 20]


@pytest.mark.parametrize(
    "line",
    [
        b"half a thought",
        b"[]",
        b"\xff",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"step": "x", "losses": [1.0]}',
        b'{"step": 3, "evaluation": {"step": 1e999}}',
        b'{"step": 3, "evaluation": {"accuracy": 0.5}}',
    ],
    ids=["no JSON", "no object", "no text", "deep", "no step", "an infinite step", "no step of the evaluation"],
)
def test_lines_of_any_other_form_are_ignored(line: bytes, file: Path, worker: ProgressLog) -> None:
    worker.add_sample(trained(20))
    with file.open("ab") as lines:
        lines.write(line + b"\n")
    worker.add_sample(trained(40))
    assert read_curves([file]) == Curves(losses={20: 0.5, 40: 0.5})


def test_control_characters_are_removed_from_names_in_the_file(file: Path) -> None:
    file.write_text(json.dumps({"step": 1, "evaluation": {"step": 1, HOSTILE: 0.5}}) + "\n")
    assert obeyed(str(read_curves([file]))) == []
