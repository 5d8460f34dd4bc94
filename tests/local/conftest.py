"""Real `tpujob run` processes for the tests of this folder; they and their workers never outlive a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.runs import Runs
from tests.trainer.gang_processes import Launcher


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    started.reap()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.reap()
