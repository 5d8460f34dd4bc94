from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.gang_processes import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.reap()
