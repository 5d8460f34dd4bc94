"""What a person watching `tpujob run` is told, on a terminal and in a pipe."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.hostile_texts import HOSTILE, obeyed
from tests.unit.reviewing_cluster import RESOLVED
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.api.text import plain
from tpu_training_operator.cli.run_view import view
from tpu_training_operator.local.progress import ProgressFollower, Report
from tpu_training_operator.local.run import Update


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_a_warning_is_shown_when_it_comes_and_as_it_was_written(
    is_terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    report = Report("training", 3, 300, 0.5)
    with view(Console(file=screen, force_terminal=is_terminal, width=100)) as shown:
        shown.update(Update(Status(), (report,), warnings=("the [bold] op aten::nonzero runs on the CPU",)))
        shown.update(Update(Status(), (report,)))
    told = screen.getvalue() + capsys.readouterr().out
    assert told.count("warning: the [bold] op aten::nonzero runs on the CPU\n") == 1


def shown_on_a_terminal(*updates: Update) -> str:
    screen = io.StringIO()
    with view(Console(file=screen, force_terminal=True, width=100)) as shown:
        for update in updates:
            shown.update(update)
    return plain(screen.getvalue()).strip().splitlines()[-1]


RUNNING = Status.read({"state": "Running", "resolved": RESOLVED})


def test_before_the_first_step_it_says_of_how_many_and_what_the_workers_do() -> None:
    line = shown_on_a_terminal(Update(RUNNING, (Report("starting", 0, 300),)))
    assert re.search(r"^Starting .* 0/300 ", line)


def test_a_gang_that_is_restarted_does_not_do_what_the_last_one_did() -> None:
    restarting = replace(RUNNING, state=State.RESTARTING)
    line = shown_on_a_terminal(
        Update(RUNNING, (Report("training", 7, 300, 0.5),)), Update(restarting, ()), Update(RUNNING, ())
    )
    assert re.search(r"^Running .* 7/300 ", line)


@pytest.mark.parametrize(
    ("report", "loss"),
    [
        (Report("training", 7, 300, 0.5, (0.25, 0.5)), "loss 0.5"),
        (Report("training", 7, 300, None, (0.5, None)), "loss nan"),
        (Report("training", 7, 300, float("nan")), "loss nan"),
        (Report("training", 7, 300, float("inf")), "loss inf"),
    ],
)
def test_a_loss_that_is_no_number_is_shown_as_such(report: Report, loss: str) -> None:
    assert loss in shown_on_a_terminal(Update(RUNNING, (report,)))


def test_what_a_loop_writes_into_the_progress_file_is_plain_or_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    line = {"phase": f"training{HOSTILE}", "step": 1, "totalSteps": 2, "warnings": [HOSTILE], "evaluation": {"step": 1}}
    deep = "[" * 100_000 + "]" * 100_000
    file.write_bytes(f"{json.dumps(line)}\n{deep}\nno JSON\n".encode() + b"\xff\n" + json.dumps(line).encode() + b"\n")
    reports = ProgressFollower(file).new_reports()
    assert len(reports) == 2
    assert obeyed(str(reports)) == []
