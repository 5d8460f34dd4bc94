from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.cluster.object_storage import ObjectStorage
from tests.cluster.toolchain import ToolchainMissing
from tests.trainer.checkpoint.faults import Blind, Faulty
from tests.trainer.checkpoint.stores import MemoryStore
from tpu_trainer.checkpoint import search
from tpu_trainer.storage import open_store
from tpu_trainer.storage.store import ObjectStore

BUCKET = "checkpoints"


@pytest.fixture(scope="session")
def object_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    """A server that speaks Google's storage API, with the bucket `BUCKET`."""
    try:
        if sys.platform != "linux":
            raise ToolchainMissing("the object storage server of the tests needs Linux")
        server = ObjectStorage(tmp_path_factory.mktemp("object-storage"))
        with server, pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            server.make_bucket(BUCKET)
            yield server
    except ToolchainMissing as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="session", autouse=True)
def _no_pauses() -> Iterator[None]:
    """Nothing here becomes visible by waiting: a store that lags counts its listings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "PAUSES", (0.0,) * len(search.PAUSES))
        yield


@pytest.fixture(params=["memory", "directory", "bucket", "lagging"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ObjectStore]:
    """Makes empty stores of one kind. A lagging one shows a run's listings without any COMMIT, and all other files
    empty; the tests' own look is true."""
    if request.param == "memory":
        return MemoryStore
    if request.param == "lagging":
        return lambda: Faulty(MemoryStore(), Blind())
    root = str(tmp_path)
    if request.param == "bucket":
        request.getfixturevalue("object_storage")
        root = f"gs://{BUCKET}/{tmp_path.name}"
    numbers = count()
    return lambda: open_store(f"{root}/{next(numbers)}")


@pytest.fixture
def store(new_store: Callable[[], ObjectStore]) -> ObjectStore:
    return new_store()
