"""trainer.code on a host: where it comes from, what is refused, and what the user's program finds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.trainer.checkpoint.conftest import BUCKET, object_storage
from tests.trainer.checkpoint.refusing_server import answering
from tests.trainer.gang_processes import ROOT, Launcher, run_spec
from tests.trainer.worker.test_archive import file, packed, special
from tpu_contract.protocol import ExitCode
from tpu_contract.run_spec import CodeSpec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import BadSpecError, StorageDeniedError, TrainerError, UserCodeError
from tpu_trainer.storage import open_store
from tpu_trainer.worker import code as trainer_code
from tpu_trainer.worker.code import install

__all__ = ["object_storage"]

TASK = b"from tests.trainer.tasks import small\n\n\ndef task(hp):\n    return small(hp)\n"


def code_of(archive: bytes, uri: str) -> dict[str, str]:
    return {"uri": uri, "sha256": hashlib.sha256(archive).hexdigest()}


def put(path: Path, archive: bytes) -> dict[str, str]:
    path.write_bytes(archive)
    return code_of(archive, str(path))


def worker(directory: Path, archive: Path | None = None) -> WorkerEnvironment:
    return WorkerEnvironment(Path("run.json"), 0, 1, "", 0, code_directory=directory, code_archive=archive)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker's disk, where the image's working directory has a module, too. Leaves this process as it was."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "path", [str(workspace), *sys.path])
    return tmp_path


def test_the_folder_takes_the_place_of_the_images_working_directory(here: Path) -> None:
    archive = packed(file("mine/task.py"))
    environ = {"PYTHONPATH": "/lib/of/mine"}
    before = [path for path in sys.path if path != str(here / "workspace")]
    # What an earlier attempt on this disk has left.
    (here / "code" / "code").mkdir(parents=True)
    (here / "code" / "code" / "old.py").touch()

    directory = install(CodeSpec(**put(here / "code.tar.gz", archive)), worker(here / "code"), environ)

    assert Path.cwd() == directory
    assert [str(path.relative_to(directory)) for path in sorted(directory.rglob("*"))] == ["mine", "mine/task.py"]
    assert sys.path == [str(directory), *before]
    assert environ == {"PYTHONPATH": f"{directory}:/lib/of/mine"}


def test_a_secret_is_read_where_it_is_mounted(here: Path) -> None:
    archive = packed(file("task.py"))
    (here / "mounted").write_bytes(archive)
    code = CodeSpec(**code_of(archive, "secret://digits-code"))
    assert (install(code, worker(here / "code", here / "mounted"), {}) / "task.py").exists()


def refusal(code: CodeSpec, here: Path, archive: Path | None = None) -> TrainerError:
    with pytest.raises(TrainerError) as raised:
        install(code, worker(here / "code", archive), {})
    assert Path.cwd() == here / "workspace"
    return raised.value


def test_another_archive_than_the_one_submitted_is_not_opened(here: Path) -> None:
    code = put(here / "code.tar.gz", packed(file("task.py")))
    (here / "code.tar.gz").write_bytes(packed(file("other.py")))
    error = refusal(CodeSpec(**code), here)
    assert isinstance(error, UserCodeError)
    assert re.match(r"\S+ \S+/code.tar.gz .* [0-9a-f]{64}", str(error))
    assert not (here / "code").exists()


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (b"<html>", "it is not a .tar.gz file"),
        (packed(file("../escaped")), "'../escaped' leads out of the"),
        (packed(special("out", b"2", "/etc")), "'out' is a link to '/etc'"),
    ],
)
def test_a_submitted_archive_that_cannot_be_unpacked_is_the_users_error(here: Path, archive: bytes, words: str) -> None:
    error = refusal(CodeSpec(**put(here / "code.tar.gz", archive)), here)
    assert isinstance(error, UserCodeError)
    assert words in str(error)
    assert "submit it again" in str(error)


@pytest.mark.parametrize(
    ("name", "hides"),
    [
        ("json.py", True),
        ("logging/__init__.py", True),
        ("torch.py", True),
        ("tools/json.py", False),
        # Python goes on to the installed package.
        ("torch/helpers.py", False),
        # Of Python's own, but the trainer imports neither.
        ("wave.py", False),
        ("turtledemo/__init__.py", False),
    ],
)
def test_what_the_trainer_would_import_in_place_of_an_installed_module_is_the_users_error(
    here: Path, name: str, hides: bool
) -> None:
    code = CodeSpec(**put(here / "code.tar.gz", packed(file("train.py"), file(name))))
    if not hides:
        assert install(code, worker(here / "code"), {}, ["tpu_trainer.worker.host"]) == Path.cwd()
        return
    with pytest.raises(UserCodeError, match=f"^trainer.code: .* {name} "):
        install(code, worker(here / "code"), {}, ["tpu_trainer.worker.host"])


def test_a_run_with_a_file_that_hides_a_module_ends_as_the_users_error(launcher: Launcher, tmp_path: Path) -> None:
    document = run_spec(entrypoint="mine.task:task")
    document["code"] = put(tmp_path / "code.tar.gz", packed(file("mine/task.py", TASK), file("json.py")))
    gang = launcher.start(document, TPUJOB_CODE_DIRECTORY=str(tmp_path / "code"))
    assert gang.wait() == [ExitCode.UserError], gang.output()
    assert "trainer would import json.py" in gang.hosts[0].message()["message"]


def test_a_missing_archive_is_the_users_error(here: Path) -> None:
    error = refusal(CodeSpec(str(here / "nowhere" / "code.tar.gz"), "0" * 64), here)
    assert isinstance(error, UserCodeError)
    assert str(error).startswith("trainer.code.uri: ")
    assert f"{here}/nowhere/code.tar.gz" in str(error)


def test_an_archive_that_is_too_large_is_not_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_code, "LARGEST_CODE_ARCHIVE", 100)
    for uri in ("/dev/zero", str(here / "workspace")):
        assert "is not a file" in str(refusal(CodeSpec(uri, "0" * 64), here))
    os.mkfifo(here / "pipe")
    assert "is not a file" in str(refusal(CodeSpec(str(here / "pipe"), "0" * 64), here))
    error = refusal(CodeSpec(**put(here / "code.tar.gz", bytes(101))), here)
    assert isinstance(error, UserCodeError)
    assert "has more than 100 bytes" in str(error)


@pytest.mark.parametrize(("uri", "words"), [("secret://x", "is not mounted"), ("s3://bucket/x", "gs://bucket/path")])
def test_a_place_that_the_worker_cannot_know(here: Path, uri: str, words: str) -> None:
    error = refusal(CodeSpec(uri, "0" * 64), here)
    assert isinstance(error, BadSpecError)
    assert words in str(error)


@pytest.mark.usefixtures("object_storage")
def test_a_bucket_without_the_archive_or_with_too_large_a_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"gs://{BUCKET}/code")
    store.put("large.tar.gz", bytes(101))
    monkeypatch.setattr(trainer_code, "LARGEST_CODE_ARCHIVE", 100)
    for name, words in (("large.tar.gz", "has more than 100 bytes"), ("large.tar", "there is no gs://")):
        error = refusal(CodeSpec(f"gs://{BUCKET}/code/{name}", "0" * 64), here)
        assert isinstance(error, UserCodeError)
        assert words in str(error)


def test_a_bucket_that_refuses_is_not_the_users_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(403, "trainer@p does not have storage.objects.list access") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{address}")
        assert isinstance(refusal(CodeSpec("gs://of-others/digits/code.tar.gz", "0" * 64), here), StorageDeniedError)


@pytest.mark.usefixtures("object_storage")
def test_a_run_trains_with_code_from_a_bucket_and_tells_when_it_continues_with_other_code(
    launcher: Launcher, tmp_path: Path
) -> None:
    def start(name: str, archive: bytes, **changes: Any) -> Any:
        open_store(f"gs://{BUCKET}/code").put(f"{name}.tar.gz", archive)
        job = {"namespace": "default", "name": "small", "uid": name, "attempt": 1}
        checkpoint = {"uri": str(tmp_path / "checkpoints"), "keep": 1}
        document = run_spec(job=job, entrypoint="mine.task:task", checkpoint=checkpoint, **changes)
        document["code"] = code_of(archive, f"gs://{BUCKET}/code/{name}.tar.gz")
        return launcher.start(document, TPUJOB_CODE_DIRECTORY=str(tmp_path / name))

    first = start("first", packed(file("mine/task.py", TASK)))
    assert first.wait() == [ExitCode.Succeeded], first.output()
    again = start("again", packed(file("mine/task.py", TASK)))
    assert again.wait() == [ExitCode.Succeeded], again.output()
    other = start("other", packed(file("mine/task.py", TASK + b"# mended\n")))
    assert other.wait() == [ExitCode.Succeeded], other.output()

    def told(run: Any) -> list[str]:
        return [text for texts in run.warnings().values() for text in texts if "other code" in text]

    assert (told(first), told(again)) == ([], [])
    assert len(told(other)) == 1
    assert re.search(r"sha256 [0-9a-f]{64}, .* sha256", told(other)[0])


def start_command(tmp_path: Path, code: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    document = {**run_spec(), "code": code}
    del document["entrypoint"]
    (tmp_path / "run.json").write_text(json.dumps(document))
    named = {"TPUJOB_RUN_SPEC": "run.json", "TPUJOB_CODE_DIRECTORY": "code", "TPUJOB_TERMINATION_LOG": "words"}
    places = {name: str(tmp_path / value) for name, value in named.items()}
    return subprocess.run(
        [sys.executable, "-m", "tpu_trainer", "run-command", *command],
        env={**os.environ, "PYTHONPATH": f"{ROOT}/trainer_image", **places},
        capture_output=True,
        text=True,
    )


SCRIPT = b"""
import os, sys
import helper
print("in", os.getcwd(), "with", helper.__file__, sys.argv[1:])
sys.exit(7)
"""


def test_a_command_runs_in_the_folder_and_ends_as_it_ends(tmp_path: Path) -> None:
    code = put(tmp_path / "code.tar.gz", packed(file("run/train.py", SCRIPT), file("helper.py", b"")))
    ended = start_command(tmp_path, code, sys.executable, "run/train.py", "--lr", "1")
    place = tmp_path / "code" / "code"
    assert ended.stdout.splitlines()[-1] == f"in {place} with {place}/helper.py ['--lr', '1']", ended.stderr
    assert ended.returncode == 7


def test_a_command_may_bring_modules_of_any_name(tmp_path: Path) -> None:
    code = put(tmp_path / "code.tar.gz", packed(file("train.sh", b"#!/bin/sh\n", mode=0o755), file("json.py")))
    ended = start_command(tmp_path, code, "./train.sh")
    assert ended.returncode == 0, ended.stderr


def test_a_program_of_the_folder_is_a_command_too(tmp_path: Path) -> None:
    archive = packed(file("train.sh", b"#!/bin/sh\necho trained\n", mode=0o755))
    ended = start_command(tmp_path, put(tmp_path / "code.tar.gz", archive), "./train.sh")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "trained"), ended.stderr


def test_a_command_that_cannot_start_leaves_words(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    code = put(tmp_path / "code.tar.gz", packed(file("train.py", SCRIPT)))
    assert start_command(tmp_path, code, "trian").returncode == ExitCode.UserError
    words = json.loads((tmp_path / "words").read_text())
    assert "trainer.command" in words["message"]
    assert words["message"] == snapshot
