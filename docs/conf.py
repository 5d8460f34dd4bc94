"""The pages as a website, `make docs`: Sphinx reads the Markdown as it stands, and a dead link is an error."""

import re
from collections.abc import Iterator

from sphinx.application import Sphinx

project = html_title = "tpu-training-operator"
extensions = ["myst_parser"]
html_theme = "furo"
html_copy_source = False
# They would make a dash of the two hyphens of an option.
smartquotes = False

root_doc = "docs/README"
include_patterns = ["*.md", "docs/**.md", "examples/*.md", "charts/*/*.md"]
# Not looked into at all, because the environment alone has tens of thousands of files.
exclude_patterns = [".*", "build", "dist", "runs", "tests"]

# GitHub's anchors.
myst_heading_anchors = 4


def _sidebar(text: str) -> Iterator[str]:
    """The pages that docs/README.md links to, section by section."""
    for section in text.removeprefix("# ").split("\n## "):
        pages = dict.fromkeys(re.findall(r"\]\(([\w./-]+)\.md", section))
        yield _list(":hidden:", f":caption: {section.partition(chr(10))[0]}", *pages)
    yield _list(":hidden:", ":caption: Project", "/CONTRIBUTING", "/CHANGELOG")


def _list(*lines: str) -> str:
    return "\n".join(["\n```{toctree}", *lines, "```\n"])


def _add_lists(app: Sphinx, page: str, source: list[str]) -> None:
    """GitHub would show these lists as text, so they are not in the pages."""
    if page == root_doc:
        source[0] += "".join(_sidebar(source[0]))
    elif page == "docs/adr/README":
        source[0] += _list(":glob:", "0*")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_lists)
