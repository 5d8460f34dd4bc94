"""Finds the programs of this machine that make a test cluster; a missing one is one error.

The test fixtures turn `ToolchainMissing` into a skip, or into a failure in CI.
"""

import shutil


class ToolchainMissing(Exception):
    """A program is not on PATH; the message says which, what it is needed for, and what to install."""


def find(program: str, *, purpose: str, install: str) -> str:
    """Absolute path of `program`.

    Raises ToolchainMissing when PATH has no such program.
    """
    path = shutil.which(program)
    if path is None:
        raise ToolchainMissing(f"`{program}` is not on PATH; it is needed to {purpose}. Install {install}.")
    return path
