"""What a person watching `tpujob run` is told, on a terminal and in a pipe."""

import io

import pytest
from rich.console import Console

from tpu_training_operator.api.status import Status
from tpu_training_operator.cli.run_view import view
from tpu_training_operator.local.progress import Report
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
