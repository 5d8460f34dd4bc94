"""docs/cli.md: every command and option of `tpujob`, as `--help` has them."""

import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from tpu_training_operator.cli.main import main

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))
WRITTEN = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### tpujob ([\w-]+).*?\n(.*?)(?=^###|\Z)", WRITTEN, re.DOTALL | re.MULTILINE))


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*arguments, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return str(result.output)


def test_a_page_without_the_part_to_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match="has no heading"):
        SCRIPT["page"]("# The tpujob command\n")


def test_every_command_has_a_section() -> None:
    listed = re.findall(r"^  ([\w-]+) ", printed().partition("Commands:")[2], re.MULTILINE)
    assert sorted(listed) == list(SECTIONS)


@pytest.mark.parametrize("command", SECTIONS)
def test_a_section_has_the_options_that_help_prints(command: str) -> None:
    options = set(re.findall(r"--[a-z-]+", printed(command).partition("Options:")[2])) - {"--help"}
    rows = [line for line in SECTIONS[command].splitlines() if line.startswith("| `")]
    assert set(re.findall(r"--[a-z-]+", " ".join(rows))) == options
