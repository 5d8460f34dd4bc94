import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _log_level_is_restored() -> Iterator[None]:
    """`tpujob` silences the package's log, and tests call it within this process."""
    log = logging.getLogger("tpu_training_operator")
    level = log.level
    yield
    log.setLevel(level)
