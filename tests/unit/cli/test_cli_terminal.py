"""What the plan and the display make of terminals of any width, of dumb ones, and of pipes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.contract.jobs import job_body
from tpu_training_operator.cli.common.job_file import load
from tpu_training_operator.cli.common.terminal import console
from tpu_training_operator.cli.plan.summary import print_summary
from tpu_training_operator.cli.watch.display import Lines, LiveTable, display

Terminal = Callable[..., None]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes rich believe that stdout is a terminal."""

    def become(columns: int, kind: str = "xterm") -> None:
        for name, value in {"FORCE_COLOR": "1", "TERM": kind, "COLUMNS": str(columns), "LINES": "40"}.items():
            monkeypatch.setenv(name, value)

    return become


def plan(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    path.write_text(yaml.safe_dump(job_body({"recipe.tunedOn": {"acceleratorType": "v5litepod-4"}})), encoding="utf-8")
    print_summary(load(path), [])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
@pytest.mark.parametrize("columns", [40, 60])
def test_a_narrow_terminal_gets_a_list_that_fits(
    terminal: Terminal, tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: int, kind: str
) -> None:
    terminal(columns, kind)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in plan(tmp_path / "job.yaml", capsys)]
    assert [line for line in lines if "│" in line or len(line) > columns] == []
    assert any(line.startswith("learning rate") for line in lines)
    assert console(140).width == columns


def test_a_pipe_gets_a_table_without_trailing_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(tmp_path / "job.yaml", capsys)
    assert any(line.startswith("│ learning rate") for line in lines)
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(("kind", "expected"), [("xterm", LiveTable), ("dumb", Lines)])
def test_a_dumb_terminal_gets_lines_as_a_pipe_does(terminal: Terminal, kind: str, expected: type) -> None:
    terminal(80, kind)
    with display(console(140)) as shown:
        assert isinstance(shown, expected)


def test_without_another_slice_nothing_is_said_to_be_tuned_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_body({})), encoding="utf-8")
    print_summary(load(path), [])
    text = capsys.readouterr().out
    assert "tuned on" not in text
    (line,) = (line for line in text.splitlines() if line.startswith("│ replicas"))
    assert line.split("│")[2].strip() == "-"
