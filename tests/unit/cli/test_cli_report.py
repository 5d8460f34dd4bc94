"""`tpujob report`: from a directory or a bucket to a page, and one line if there is nothing to make it from."""

from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner, Result
from syrupy.assertion import SnapshotAssertion

from tests.unit.histories import SUCCEEDED, document, typical
from tpu_training_operator.cli.main import main


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_a_directory_with_a_history_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "history.json").write_bytes(document(typical(), outcome=SUCCEEDED))
    monkeypatch.chdir(tmp_path)
    result = report("job")
    assert (result.exit_code, result.output) == (0, "report.html\n")
    assert "trained 5000 steps" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_place_that_fsspec_knows_is_read_from_there(tmp_path: Path) -> None:
    with fsspec.open("memory://bucket/job/history.json", "wb") as file:
        file.write(document(typical()))
    page = tmp_path / "page.html"
    assert report("memory://bucket/job/", "-o", page).exit_code == 0
    assert "Running" in page.read_text(encoding="utf-8")


def test_a_name_without_a_utf_8_form_does_not_stop_the_page(tmp_path: Path) -> None:
    (tmp_path / "history.json").write_bytes(document(outcome={"code": "UserError", "message": "no \udcff.csv"}))
    assert report(tmp_path, "-o", tmp_path / "page.html").exit_code == 0


def test_a_report_is_of_a_place_or_of_a_job() -> None:
    assert "give a PLACE or --job NAME" in report().stderr


@pytest.mark.parametrize(
    "place",
    [
        "nowhere",
        "memory://nowhere",
        "torn",
        "deep",
        "large",
        "folder",
        "what://there",
    ],
)
def test_what_is_missing_or_wrong_is_one_line_and_exit_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "history.json").write_bytes(b'{"schema": "hist')
    for name in ("deep", "large", "folder/history.json"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "deep" / "history.json").write_bytes(b"[" * 100_000)
    with (tmp_path / "large" / "history.json").open("wb") as file:
        file.truncate(5 * 10**9)
    monkeypatch.chdir(tmp_path)
    result = report(place)
    assert result.exit_code == 1
    # What follows are Python's words, which differ between its versions.
    assert result.stderr.partition(" JSON: ")[0] == snapshot
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_without_gcsfs_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    result = report("gs://bucket/job")
    assert result.exit_code == 1
    assert result.stderr == snapshot
