"""What every store promises, on all of them; what a person is told when a place refuses."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import gcsfs.retry
import pytest

from tests.cluster.object_storage import ObjectStorage
from tests.cluster.ports import free_port
from tests.trainer.checkpoint.conftest import BUCKET
from tpu_trainer.checkpoint.directory_store import DirectoryStore
from tpu_trainer.checkpoint.store import MissingError, Store, open_store
from tpu_trainer.errors import BadSpecError, StorageError


def test_an_object_reads_as_it_was_written(store: Store) -> None:
    data = bytes(range(256)) * 40
    store.put("step-1/a", data)
    assert store.read("step-1/a") == data


def test_writing_again_replaces_the_object(store: Store) -> None:
    store.put("step-1/a", b"long and old")
    store.put("step-1/a", b"new")
    assert store.read("step-1/a") == b"new"
    assert store.list("step-1/") == {"step-1/a": 3}


def test_a_listing_has_every_object_of_the_prefix_with_its_size_and_no_other(store: Store) -> None:
    for name, data in (("step-1/a", b"12"), ("step-1/b", b""), ("step-2/a", b"1"), ("other/a", b"1")):
        store.put(name, data)
    assert store.list("step-") == {"step-1/a": 2, "step-1/b": 0, "step-2/a": 1}
    assert store.list("step-1/") == {"step-1/a": 2, "step-1/b": 0}


def test_a_place_where_nothing_was_written_lists_empty(store: Store) -> None:
    assert store.list("step-") == {}


def test_only_the_first_of_two_that_create_an_object_does(store: Store) -> None:
    assert store.put_if_absent("step-1/COMMIT", b"first")
    assert not store.put_if_absent("step-1/COMMIT", b"second")
    assert store.read("step-1/COMMIT") == b"first"


def test_a_deleted_object_is_gone_and_may_be_deleted_again(store: Store) -> None:
    store.put("step-1/a", b"1")
    store.delete("step-1/a")
    store.delete("step-1/a")
    assert store.list("") == {}
    with pytest.raises(MissingError, match=r"step-1/a is not there"):
        store.read("step-1/a")


@pytest.mark.parametrize(
    "uri", ["", "s3://bucket/path", "relative/path", "gs://", "gs://bucket", "gs://bucket/", "gs:///path", "file:///x"]
)
def test_what_is_neither_a_bucket_with_a_path_nor_an_absolute_path_is_a_bad_spec(uri: str) -> None:
    with pytest.raises(BadSpecError) as raised:
        open_store(uri)
    assert str(raised.value) == f'checkpoint.uri: "gs://bucket/path" or the absolute path of a directory, got {uri!r}'


def test_a_large_object_is_sent_to_the_bucket_in_pieces_and_reads_as_it_was(
    object_storage: ObjectStorage, recwarn: pytest.WarningsRecorder
) -> None:
    store = open_store(f"gs://{BUCKET}/large")
    data = os.urandom(1 << 20) * 51
    store.put("step-1/a", data)
    assert store.read("step-1/a") == data


def test_the_bucket_is_asked_whether_it_holds_what_was_sent(
    object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"gs://{BUCKET}/altered")
    send = store._files.pipe_file
    monkeypatch.setattr(store._files, "pipe_file", lambda name, data: send(name, data[:-1] + b"!"))
    with pytest.raises(StorageError, match="cannot write step-1/a: the bucket holds other bytes than were sent"):
        store.put("step-1/a", b"sent")


def test_a_bucket_that_does_not_exist_is_named_by_every_operation(object_storage: ObjectStorage) -> None:
    store = open_store("gs://no-such-bucket/path")
    for operation in (lambda: store.list("step-"), lambda: store.put("a", b""), lambda: store.put_if_absent("a", b"")):
        with pytest.raises(
            StorageError, match=r"gs://no-such-bucket/path: cannot .*: there is no bucket no-such-bucket$"
        ):
            operation()


def test_a_server_that_cannot_be_reached_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{free_port()}")
    no_pauses = SimpleNamespace(sleep=lambda _: asyncio.sleep(0))
    monkeypatch.setattr(gcsfs.retry, "asyncio", no_pauses)
    store = open_store("gs://bucket/path")
    with pytest.raises(StorageError, match=r"^gs://bucket/path: cannot list the bucket: no connection: [^\n]+$"):
        store.list("step-")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("Forbidden: b/x/o\nthe account has no storage.objects.list"), "permission denied: the account has no"),
        (gcsfs.retry.HttpError({"code": 401, "message": "Anonymous caller"}), "no valid Google credentials: Anonymous"),
        (TimeoutError(), "no connection: TimeoutError"),
        (gcsfs.retry.HttpError({"code": 503, "message": "try later"}), "HttpError: try later, 503"),
    ],
)
def test_what_the_bucket_answers_becomes_one_line(
    error: Exception, said: str, object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"gs://{BUCKET}/refusing")

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(store._files, "cat_file", refuse)
    with pytest.raises(StorageError, match=f"^gs://{BUCKET}/refusing: cannot read a: {said}[^\n]*$"):
        store.read("a")


def test_a_file_in_the_place_of_the_directory_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = DirectoryStore(tmp_path / "file")
    for operation in (lambda: store.list("step-"), lambda: store.put("a/b", b""), lambda: store.read("a/b")):
        with pytest.raises(StorageError, match=f"^{tmp_path}/file: cannot [^\n]*: (Not a directory|File exists)$"):
            operation()


def test_a_full_disk_leaves_the_object_that_was_there(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("step-1/a", b"whole")
    (tmp_path / "step-1/a.part").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="cannot write step-1/a: No space left on device"):
        store.put("step-1/a", b"more than fits")
    assert store.read("step-1/a") == b"whole"
    assert store.list("") == {"step-1/a": 5}


def test_a_directory_goes_with_its_last_file_but_the_root_stays(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "root")
    store.put("step-1/a", b"")
    store.delete("step-1/a")
    assert list(tmp_path.rglob("*")) == [tmp_path / "root"]
