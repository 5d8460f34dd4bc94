"""What `tpujob run` shows, on a terminal and in a pipe."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from tests.unit.reviewing_cluster import RESOLVED
from tpu_training_operator.api.status import Progress, ReportPhase, State, Status
from tpu_training_operator.api.text import plain
from tpu_training_operator.cli.run_view import view

RUNNING = Status.read({"state": "Running", "resolved": RESOLVED})


def reported(step: int, phase: ReportPhase | None = ReportPhase.TRAINING, **fields: Any) -> Status:
    return replace(RUNNING, progress=Progress(phase=phase, step=step, total_steps=300, **fields))


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_a_warning_is_shown_once_and_literally(is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    warnings = ["the [bold] op aten::nonzero runs on the CPU"]
    with view(Console(file=screen, force_terminal=is_terminal, width=100)) as shown:
        shown.update(reported(3, warnings=warnings))
        shown.update(reported(4, warnings=warnings))
    told = screen.getvalue() + capsys.readouterr().out
    assert told.count("warning: the [bold] op aten::nonzero runs on the CPU\n") == 1


def test_new_metrics_are_shown_once_with_their_step(capsys: pytest.CaptureFixture[str]) -> None:
    with view(Console(file=io.StringIO(), force_terminal=False)) as shown:
        for step in (20, 21):
            shown.update(reported(step, metrics={"accuracy": "0.5", "perplexity": "nan"}))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "evaluated" in line] == ["step 20/300  evaluated:  accuracy 0.5  perplexity nan"]


def test_a_pipe_gets_a_line_for_a_twentieth_of_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    with view(Console(file=io.StringIO(), force_terminal=False)) as shown:
        for step in range(0, 50, 5):
            shown.update(reported(step, loss="0.5", examples_per_second="900.4"))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"step {step}/300  loss 0.5  900 examples/s" for step in (15, 30, 45)]


def shown_on_a_terminal(*updates: Status) -> str:
    screen = io.StringIO()
    with view(Console(file=screen, force_terminal=True, width=100)) as shown:
        for update in updates:
            shown.update(update)
    return plain(screen.getvalue()).strip().splitlines()[-1]


def test_before_the_first_step_the_bar_shows_the_phase_and_the_number_of_steps() -> None:
    line = shown_on_a_terminal(reported(0, ReportPhase.STARTING))
    assert re.search(r"^Starting .* 0/300 ", line)


def test_a_restarted_gang_does_not_show_the_phase_of_the_attempt_before() -> None:
    restarting = replace(reported(7, phase=None), state=State.RESTARTING)
    line = shown_on_a_terminal(reported(7, loss="0.5"), restarting, reported(7, phase=None))
    assert re.search(r"^Running .* 7/300 ", line)


@pytest.mark.parametrize("loss", ["0.5", "nan", "inf"])
def test_a_loss_that_is_not_finite_is_shown_as_such(loss: str) -> None:
    assert f"loss {loss}" in shown_on_a_terminal(reported(7, loss=loss))
