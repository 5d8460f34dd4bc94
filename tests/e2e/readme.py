"""The commands that README gives for a cluster, so that the tests run exactly these."""

import shlex
from pathlib import Path

_README = Path(__file__).parents[2] / "README.md"
_SECTION = "## On a cluster"


def cluster_commands() -> list[list[str]]:
    """The commands of the section's first code block, split into words."""
    section = _README.read_text().partition(_SECTION)[2].partition("\n## ")[0]
    block = section.split("```")[1].partition("\n")[2]
    return [shlex.split(line) for line in block.splitlines() if line.strip()]
