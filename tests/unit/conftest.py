"""Hypothesis for this layer: no deadline, because a loaded machine is not a bug, and a blob to repeat a failure."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unit", deadline=None, print_blob=True)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _log_level_is_restored() -> Iterator[None]:
    """`tpujob` silences the package's log, and tests call it within this process."""
    log = logging.getLogger("tpu_training_operator")
    level = log.level
    yield
    log.setLevel(level)
