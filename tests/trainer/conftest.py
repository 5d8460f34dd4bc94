from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.gang import Launcher


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled modules, shared by all the processes of a test run."""
    return tmp_path_factory.mktemp("bytecode")


@pytest.fixture
def launcher(tmp_path: Path, bytecode: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, bytecode)
    yield launcher
    launcher.reap()
