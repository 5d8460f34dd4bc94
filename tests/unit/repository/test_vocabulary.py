"""Nobody finds an old word: one thing has one name, in code, messages and documentation (docs/glossary.md)."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
THIS = str(Path(__file__).relative_to(ROOT))

# What readers search for in history only.
ELSEWHERE = ("CHANGELOG.md", "docs/adr/", THIS)

OLD = {
    # fields of the API
    r"\bscaleUp\b|\bscale_up\b|\bScaleUp\w+": "ladder",
    r"\beveryMinutes\b|\bevery_minutes\b": "everySeconds",
    r"\bplacement\.shrink\b|\bplacement\.grow\b": "placement.onLoss, placement.returnToPreferred",
    r"\bmovesForNodes\b": "movesForCapacity",
    # conditions, reasons and events
    r"\bStepCompiled\b": "StepFits",
    r"\bEntryChecked\b": "EntryCheckPassed",
    "DataLocal|DataNear|DataFar|data_local": "DataInRegion",
    "FailedAgain": "DivergedTwice",
    r"\bQueueLeft\b": "QuotaReleased",
    # the two checks
    "[Pp]reflight|PREFLIGHT": "entry check, or compile check",
    # rooms and modules that are gone
    r"\blifecycle[./]\w|domain/recipe|domain\.recipe": "domain.plan, domain.job.recipe",
    r"tpu_trainer[./](backends|telemetry|preflight)\b": "gang.backends, reporting, checks.compile",
    r"\b(telling|steering|steady)\.py": "run_outputs, evaluation_policy, scalars_as_data",
    # names
    r"\bwith_growth\b|\bwith_proof\b|\bTellOfGrowth\b": "hold_nodes, ask_for_better_slice",
    r"\bWeight\.(NONE|STATUS|EFFECTS)\b": "Freshness",
    r"\bSteadyNumbers\b|\bquickly\(": "ScalarsAsData, call_in_place",
    r"\bopen_mirror\b": "open_solo",
    r"Kind\.(SETTLED|STUCK)\b": "CURRENT, FAILED",
    r"(?i)restart[ _]budget|budgets? of restarts|class's budget": "restart limits, restarts left",
    # phrases that no native engineer writes
    r"\ball the same\b": "anyway, or nothing",
    r"\bin vain\b": "without effect",
    r"\banew\b": "again",
    r"\bmust not hide\b": "should not mask",
}


def tracked(*folders: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in names.decode().split("\0") if name and not name.startswith(ELSEWHERE)]


def texts(*folders: str) -> dict[str, str]:
    found = {}
    for path in tracked(*folders):
        try:
            found[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
    return found


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return texts(
        "contract",
        "operator",
        "trainer_image",
        "docs",
        "examples",
        "charts",
        "crds",
        "release",
        "README.md",
        "CONTRIBUTING.md",
    )


@pytest.mark.parametrize("word", OLD)
def test_an_old_word_is_gone(files: dict[str, str], word: str) -> None:
    assert len(files) > 300
    pattern = re.compile(word)
    left = [
        f"{name}:{number}: {line.strip()}"
        for name, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert left == [], f"the word is now: {OLD[word]}"


FRAGMENT = re.compile(r"(Of|Those|As|Whose|With|Between) ")


def fragments(text: str) -> Iterator[str]:
    """The docstrings whose subject only the signature tells. A class, a module or a value may be a "What ..."."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if FRAGMENT.match(docstring) or (is_function and docstring.startswith("What ")):
                yield docstring.partition("\n")[0]


def test_a_docstring_begins_with_what_the_function_does(files: dict[str, str]) -> None:
    left = {name: list(fragments(text)) for name, text in files.items() if name.endswith(".py")}
    assert {name: docstrings for name, docstrings in left.items() if docstrings} == {}


CLASS = re.compile(r"^class ([A-Z]\w+)", re.MULTILINE)
# What users import from the callbacks of two frameworks.
TWICE_ON_PURPOSE = {"TPUJobCallback"}


def test_a_class_name_has_one_meaning_in_the_whole_product(files: dict[str, str]) -> None:
    product = ("contract/", "operator/", "trainer_image/")
    names = Counter(
        name
        for path, text in files.items()
        if path.startswith(product) and path.endswith(".py")
        for name in CLASS.findall(text)
    )
    assert {name for name, number in names.items() if number > 1} == TWICE_ON_PURPOSE
