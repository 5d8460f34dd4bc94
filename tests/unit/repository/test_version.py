"""What a version says: which release, which commit, and whether somebody has changed it since."""

import subprocess
from pathlib import Path

import pytest

from tpu_training_operator import version


@pytest.mark.parametrize(
    ("of_python", "tag"),
    [
        ("0.2.0", "0.2.0"),
        ("0.2.0.dev0", "0.2.0-dev.0"),
        ("0.2.0.dev0+g1234abc", "0.2.0-dev.0.g1234abc"),
        ("0.2.0.dev0+g1234abc.dirty", "0.2.0-dev.0.g1234abc.dirty"),
        ("0.2.0+g1234abc.dirty", "0.2.0-g1234abc.dirty"),
    ],
)
def test_a_tag_is_the_version_without_a_plus(of_python: str, tag: str) -> None:
    assert version.tag(of_python) == tag


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("as committed")
    for command in ("init", "add .", "-c user.name=a -c user.email=a@b.example commit --message=first"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True, capture_output=True)
    return tmp_path


def commit(clone: Path) -> str:
    asked = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout[:7]


@pytest.mark.parametrize(
    ("declared", "clean", "changed"),
    [
        ("0.2.0.dev0", "0.2.0.dev0+gCOMMIT", "0.2.0.dev0+gCOMMIT.dirty"),
        ("0.2.0", "0.2.0", "0.2.0+gCOMMIT.dirty"),
    ],
    ids=["between releases", "a release"],
)
def test_a_clone_names_its_commit_and_changes(
    clone: Path, monkeypatch: pytest.MonkeyPatch, declared: str, clean: str, changed: str
) -> None:
    monkeypatch.setattr(version, "DECLARED", declared)
    found = [version.of_tree(clone)]
    (clone / "file").write_text("since")
    found.append(version.of_tree(clone))
    assert found == [text.replace("COMMIT", commit(clone)) for text in (clean, changed)]


def test_a_tree_without_git_has_the_version_that_it_declares(tmp_path: Path) -> None:
    assert version.of_tree(tmp_path) == version.DECLARED


def test_a_machine_without_git_has_the_version_that_is_declared(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert version.of_tree(clone) == version.DECLARED
