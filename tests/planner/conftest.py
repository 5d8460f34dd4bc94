"""Keeps the operator's log out of thousands of passes, a tenth of whose time pytest's capture of it would take."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
