"""Every link between the pages of the repository leads to a file and, where it names one, to a heading in it; and every
page and example is one link away from the page where people look for it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(path for part in ("docs", "charts", "examples") for path in ROOT.glob(f"{part}/**/*.md"))]
)

_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def text_of(page: Path) -> str:
    return _CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in shown}


def dead(page: Path) -> Iterator[str]:
    for file, anchor in _LINK.findall(text_of(page)):
        if file.startswith(("http:", "https:", "mailto:")):
            continue
        target = (page.parent / file).resolve() if file else page
        # GitHub shows a directory, but a website has no page for it (`make docs`).
        if not target.is_file():
            yield file
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{file}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_no_link_is_dead(page: Path) -> None:
    assert list(dead(page)) == []


def linked(page: Path) -> set[Path]:
    return {(page.parent / file).resolve() for file, _ in _LINK.findall(text_of(page)) if file and ":" not in file}


def test_every_page_is_one_link_away_from_the_first_page_of_the_documentation() -> None:
    pages = {*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")}
    assert pages - linked(ROOT / "docs" / "README.md") == {ROOT / "docs" / "README.md"}


def test_every_example_is_on_the_page_of_the_examples() -> None:
    page = ROOT / "examples" / "README.md"
    examples = {file for file in page.parent.iterdir() if file.suffix in (".py", ".yaml", ".sh")}
    assert examples - linked(page) == set()
