"""docs/from-train-py.md shows each script's way to a job as the difference between two files that run."""

import re
from difflib import unified_diff
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "from_train_py"
PAGE = (ROOT / "docs" / "from-train-py.md").read_text(encoding="utf-8")
FLAVOURS = ("plain", "huggingface", "lightning")


def difference(flavour: str) -> str:
    before, after = (
        (EXAMPLES / flavour / name).read_text(encoding="utf-8").splitlines() for name in ("before.py", "train.py")
    )
    lines = unified_diff(before, after, f"{flavour}/before.py", f"{flavour}/train.py", n=1, lineterm="")
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_page_shows_the_difference_between_the_two_scripts(flavour: str) -> None:
    shown = re.findall(rf"^```diff\n(--- {flavour}/.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert shown == [difference(flavour)]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_page_shows_the_recipe_of_the_job(flavour: str) -> None:
    recipe = (EXAMPLES / flavour / "job.yaml").read_text(encoding="utf-8").partition("  recipe:\n")
    assert f"```yaml\n{recipe[1]}{recipe[2]}```" in PAGE
