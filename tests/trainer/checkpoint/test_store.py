"""What every store promises, on all of them, and the message if a place refuses."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import gcsfs.retry
import pytest
from google.auth.exceptions import RefreshError
from syrupy.assertion import SnapshotAssertion

from tests.cluster.object_storage import ObjectStorage
from tests.cluster.ports import free_port
from tests.trainer.checkpoint.conftest import BUCKET
from tests.trainer.checkpoint.refusing_server import answering
from tpu_trainer.contract.errors import BadSpecError, StorageDeniedError, StorageError
from tpu_trainer.storage import open_store
from tpu_trainer.storage.store import DirectoryStore, MissingError, ObjectStore

NO_PAUSES = SimpleNamespace(sleep=lambda _: asyncio.sleep(0))


def test_an_object_reads_as_it_was_written(store: ObjectStore) -> None:
    data = bytes(range(256)) * 40
    store.put("step-1/a", data)
    assert store.read("step-1/a") == data


def test_writing_again_replaces_the_object(store: ObjectStore) -> None:
    store.put("step-1/a", b"long and old")
    store.put("step-1/a", b"new")
    assert store.read("step-1/a") == b"new"
    assert store.list("step-1/") == {"step-1/a": 3}


def test_a_listing_has_exactly_the_objects_of_the_prefix_with_their_sizes(store: ObjectStore) -> None:
    for name, data in (("part-1/a", b"12"), ("part-1/b", b""), ("part-2/a", b"1"), ("other/a", b"1")):
        store.put(name, data)
    assert store.list("part-") == {"part-1/a": 2, "part-1/b": 0, "part-2/a": 1}
    assert store.list("part-1/") == {"part-1/a": 2, "part-1/b": 0}


def test_a_place_where_nothing_was_written_lists_empty(store: ObjectStore) -> None:
    assert store.list("step-") == {}


def test_only_the_first_of_two_writers_creates_an_object(store: ObjectStore) -> None:
    assert store.put_if_absent("step-1/COMMIT", b"first")
    assert not store.put_if_absent("step-1/COMMIT", b"second")
    assert store.read("step-1/COMMIT") == b"first"


def test_a_directory_without_hard_links_has_one_creator_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = DirectoryStore(tmp_path)
    assert store.put_if_absent("step-1/COMMIT", b"first")
    assert not store.put_if_absent("step-1/COMMIT", b"second")
    assert store.read("step-1/COMMIT") == b"first"
    assert store.list("") == {"step-1/COMMIT": 5}


def test_a_deleted_object_is_gone_and_may_be_deleted_again(store: ObjectStore) -> None:
    store.put("step-1/a", b"1")
    store.delete("step-1/a")
    store.delete("step-1/a")
    assert store.list("") == {}
    with pytest.raises(MissingError, match=r"step-1/a is not there"):
        store.read("step-1/a")


@pytest.mark.parametrize(
    "uri", ["", "s3://bucket/path", "relative/path", "gs://", "gs://bucket", "gs://bucket/", "gs:///path", "file:///x"]
)
def test_anything_but_a_bucket_with_a_path_or_an_absolute_path_is_a_bad_spec(uri: str) -> None:
    with pytest.raises(BadSpecError) as raised:
        open_store(uri)
    assert str(raised.value).startswith("checkpoint.uri: ")
    assert str(raised.value).endswith(f"got {uri!r}")


def test_a_large_object_is_sent_to_the_bucket_in_pieces_and_reads_as_it_was(
    object_storage: ObjectStorage, recwarn: pytest.WarningsRecorder
) -> None:
    store = open_store(f"gs://{BUCKET}/large")
    data = os.urandom(1 << 20) * 51
    store.put("step-1/a", data)
    assert store.read("step-1/a") == data


def test_the_bucket_is_asked_whether_it_holds_the_bytes_that_were_sent(
    object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    store = open_store(f"gs://{BUCKET}/altered")
    send = store._files.pipe_file
    monkeypatch.setattr(store._files, "pipe_file", lambda name, data: send(name, data[:-1] + b"!"))
    with pytest.raises(StorageError) as caught:
        store.put("step-1/a", b"sent")
    assert str(caught.value) == snapshot


def test_a_bucket_that_does_not_exist_is_named_by_every_operation(
    object_storage: ObjectStorage, snapshot: SnapshotAssertion
) -> None:
    store = open_store("gs://no-such-bucket/path")
    for operation in (lambda: store.list("step-"), lambda: store.put("a", b""), lambda: store.put_if_absent("a", b"")):
        with pytest.raises(StorageDeniedError) as caught:
            operation()
        assert str(caught.value) == snapshot


def test_a_server_that_cannot_be_reached_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(gcsfs.retry, "asyncio", NO_PAUSES)
    store = open_store("gs://bucket/path")
    with pytest.raises(StorageError, match=r"^gs://bucket/path: [^\n]+$"):
        store.list("step-")
    assert caplog.text == ""


GRANT = "needs roles/storage.objectUser on gs://bucket"


@pytest.mark.parametrize(
    ("status", "message", "lasting", "said"),
    [
        (403, "sa@p does not have storage.objects.list access", True, f"permission denied: sa@p does not .*{GRANT}"),
        (403, "The project exceeded the rate limit", False, "The project exceeded the rate limit"),
        (401, "Anonymous caller does not have access", True, f"no valid Google credentials: Anonymous .*{GRANT}"),
        (404, "The specified bucket does not exist.", True, "there is no bucket bucket: correct its name or create it"),
        (429, "too many requests", False, "HttpError: too many requests, 429"),
        (503, "try later", False, "HttpError: try later, 503"),
    ],
)
def test_a_buckets_refusal_is_one_line_and_lasting_if_a_retry_cannot_help(
    status: int, message: str, lasting: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcsfs.retry, "asyncio", NO_PAUSES)
    with answering(status, message) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{address}")
        store = open_store("gs://bucket/refusing")
        for operation in (lambda: store.list("step-"), lambda: store.put("a", b"")):
            with pytest.raises(StorageError, match=f"^gs://bucket/refusing: cannot [^\n]*: {said}[^\n]*$") as raised:
                operation()
            assert isinstance(raised.value, StorageDeniedError) == lasting


METADATA = "Failed to retrieve http://metadata/token from the Google Compute Engine metadata service."


@pytest.mark.parametrize(
    ("cause", "lasting", "said"),
    [
        (
            f"{METADATA} Status: 403 Response:\nIAM refused",
            True,
            f"no valid Google credentials: IAM refused; .*{GRANT}",
        ),
        (f"{METADATA} Status: 503 Response:\nlater", False, "no connection to the metadata server that gives"),
        (f"{METADATA} Compute Engine Metadata server unavailable due to timeout", False, "no connection to the metad"),
    ],
    ids=["no binding to a service account", "failing", "not up yet"],
)
def test_a_metadata_server_without_a_token_differs_from_one_that_is_not_up_yet(
    cause: str, lasting: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    store = open_store("gs://bucket/path")

    def refuse(*_: object) -> None:
        # As gcsfs raises it.
        raise gcsfs.retry.HttpError({"code": 401, "message": "Invalid Credentials"}) from RefreshError(cause)

    monkeypatch.setattr(store._files, "cat_file", refuse)
    with pytest.raises(StorageError, match=f"^gs://bucket/path: cannot read a: {said}[^\n]*$") as raised:
        store.read("a")
    assert isinstance(raised.value, StorageDeniedError) == lasting


def test_a_file_in_the_place_of_the_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = DirectoryStore(tmp_path / "file")
    for operation in (lambda: store.list("step-"), lambda: store.put("a/b", b""), lambda: store.read("a/b")):
        with pytest.raises(StorageError, match=f"^{tmp_path}/file: cannot [^\n]*: (Not a directory|File exists)$"):
            operation()


def test_a_full_disk_leaves_the_object_that_was_there(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    store = DirectoryStore(tmp_path)
    store.put("step-1/a", b"whole")
    (tmp_path / "step-1/a.part").symlink_to("/dev/full")
    with pytest.raises(StorageError) as raised:
        store.put("step-1/a", b"more than fits")
    assert str(raised.value) == snapshot
    assert not isinstance(raised.value, StorageDeniedError)
    assert store.read("step-1/a") == b"whole"
    assert store.list("") == {"step-1/a": 5}


AS_A_STRANGER = """
import os, sys
from tpu_trainer.storage import open_store
from tpu_trainer.contract.errors import StorageDeniedError
os.setgid(65532); os.setuid(65532)
try:
    getattr(open_store(sys.argv[1]), sys.argv[2])(*sys.argv[3:])
except StorageDeniedError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("operation", [("list", "step-"), ("delete", "step-1/a")])
def test_a_directory_of_another_user_names_the_user_that_must_be_let_in(operation: tuple[str]) -> None:
    # Not pytest's folder: each session that starts closes it for other users.
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "place")
        DirectoryStore(place).put("step-1/a", b"")
        Path(directory).chmod(0o755)
        (place / "step-1").chmod(0o700)
        command = [sys.executable, "-c", AS_A_STRANGER, str(place), *operation]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"Permission denied ({place}/step-1" in said
    assert "as user 65532 of group 65532" in said


def test_a_directory_is_deleted_with_its_last_file_but_the_root_stays(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "place")
    store.put("step-1/a", b"")
    store.delete("step-1/a")
    assert list(tmp_path.rglob("*")) == [tmp_path / "place"]
