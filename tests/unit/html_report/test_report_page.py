"""The report as a browser shows it, on a wide screen, on a phone, and on paper."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit import chromium
from tests.unit.histories import SUCCEEDED, attempt, losses_of, page_of, run_of, typical, warned
from tpu_training_operator.html_report.ending import JobEnd, JobResult, LogTail

LONG = "a" * 200
SCALING = [
    {"name": "slice", "tunedOn": "v5litepod-4", "runsOn": "2 x v5litepod-16", "rule": ""},
    {"name": "learning rate", "tunedOn": "0.1", "runsOn": "0.2828427125", "rule": "the square-root rule"},
    dict.fromkeys(("name", "tunedOn", "runsOn", "rule"), LONG),
]
WORDY = run_of(30, broken=(7, 30)) | {
    "evaluations": [{"step": 30, "metrics": {LONG: math.nan}}],
    "warnings": [warned(LONG, LONG, 30)],
    "logged": [{"name": f"{LONG}/{LONG}", "stride": 1, "points": losses_of([0.5, 1e-9])}],
    "attempts": [attempt(1, 165_000, 200_000, LONG), attempt(2, 200_000, 230_000, "UserError")],
}
CURVES = ["numbers", "loss", "evaluations", "throughput", "time", "warnings", "recipe"]
RUNS: dict[str, tuple[dict[str, Any], dict[str, str] | None, str, list[str]]] = {
    "a whole run": (typical(), SUCCEEDED, "resnet50", [*CURVES, "attempts", "environment"]),
    "a running one of a single step": (
        run_of(1),
        None,
        "one",
        ["numbers", "loss", "time", "warnings", "recipe", "environment"],
    ),
    "one without a step": (
        {},
        {"code": "BadSpec", "message": "refused"},
        "none",
        ["numbers", "recipe", "environment"],
    ),
    "long words": (
        WORDY,
        {"code": "UserError", "message": f"Traceback:\n  {LONG}"},
        LONG,
        ["failure", *CURVES[:2], "logged", *CURVES[2:], "attempts", "environment"],
    ),
}
"""What was recorded, how it ended, the job's name, and the sections of its page."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    if chromium.program() is None:
        missing = "no Chromium on PATH, to open the report with (Debian: chromium)"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with chromium.chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(params=list(RUNS))
def report(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    recorded, outcome, name, _ = RUNS[request.param]
    job = {"namespace": "vision", "name": name, "uid": "5f0c", "attempt": 1}
    spec = {"job": job, "entrypoint": f"{LONG}:{LONG}", "trainSteps": 5000, "scaling": SCALING}
    file = tmp_path / "report.html"
    end = JobEnd(JobResult.FAILED, "", LONG, LONG, f"a\n{LONG}", LogTail(LONG, [LONG])) if name == LONG else None
    file.write_text(page_of(recorded, end, spec=spec, outcome=outcome), encoding="utf-8")
    return file


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_all_sections_are_laid_out_and_nothing_is_asked_for_elsewhere(
    page: chromium.Page, report: Path, width: int, dark: bool, request: pytest.FixtureRequest
) -> None:
    page.open(report, width, dark)
    assert page.requests == [report.as_uri()]
    sizes = page.evaluate(
        "[...document.querySelectorAll('section, .plot svg, svg.split, h1, .badge')]"
        ".map(e => e.getBoundingClientRect()).map(box => [box.width, box.height])"
    )
    assert all(wide > 0 and high > 0 for wide, high in sizes)
    shown = page.evaluate("[...document.querySelectorAll('section')].map(section => section.id)")
    assert shown == RUNS[request.node.callspec.params["report"]][3]


@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_sticks_out_to_the_side(page: chromium.Page, report: Path, width: int) -> None:
    page.open(report, width, dark=False)
    sticking_out = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"
    )
    assert sticking_out == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_labels_of_an_axis_do_not_run_into_each_other(page: chromium.Page, report: Path) -> None:
    for width in (1200, 400):
        page.open(report, width, dark=False)
        meeting = page.evaluate(
            "[...document.querySelectorAll('.columns, .frame')].flatMap(axis => {"
            " const boxes = [...axis.querySelectorAll('.x, .y')].map(e => [e.getBoundingClientRect(), e.textContent])"
            "   .filter(([box]) => box.width);"
            " return boxes.flatMap(([a, text], i) => boxes.slice(i + 1)"
            "   .filter(([b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)"
            "   .map(([_, other]) => text + ' and ' + other)) })"
        )
        assert meeting == []


CONTRASTS = """
(() => {
  const part = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = color => { const [r, g, b] = color.match(/[0-9.]+/g).map(Number);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b) };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!c.endsWith(', 0)')) return c } return 'rgb(255, 255, 255)' };
  return [...document.querySelectorAll('main *')].filter(e => [...e.childNodes].some(n => n.nodeType == 3 &&
      n.data.trim()) && !(e instanceof SVGElement)).map(e => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.textContent.slice(0, 40)] }).filter(([contrast]) => contrast < 4.5)
})()
"""
"""The texts with less contrast than WCAG 2.2 asks for (AA, 4.5 to 1)."""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(page: chromium.Page, report: Path, dark: bool) -> None:
    page.open(report, 1200, dark)
    assert page.evaluate(CONTRASTS) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 23, 26)" if dark else "rgb(253, 253, 252)")


def test_it_is_printed_dark_on_white_whatever_the_screen(page: chromium.Page, report: Path) -> None:
    page.open(report, 800, dark=True)
    page.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(CONTRASTS) == []


def test_all_that_scrolls_can_be_reached_by_keyboard_and_every_drawing_has_words(
    page: chromium.Page, report: Path
) -> None:
    page.open(report, 390, dark=False)
    unreachable = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.scrollHeight > e.clientHeight + 1 &&"
        " ['auto', 'scroll'].includes(getComputedStyle(e).overflowY) && e.tabIndex < 0).map(e => e.className)"
    )
    assert unreachable == []
    silent = "[...document.querySelectorAll('svg')].filter(e => e.getAttribute('aria-label').length < 20).length"
    assert page.evaluate(silent) == 0


def test_the_page_allows_itself_no_script_and_no_request(page: chromium.Page, report: Path) -> None:
    page.open(report, 1200, dark=False)
    stopped = page.evaluate(
        "(() => { const script = document.createElement('script'); script.text = 'window.ran = true';"
        " document.body.append(script); return window.ran === undefined })()"
    )
    assert stopped
