"""The wheel of `tpujob`, the operator and the trainer: one distribution, as pyproject.toml has it.

Built by setuptools in this environment, which constraints.txt pins, and without network.
"""

import os
import subprocess
import sys
from pathlib import Path

from release.errors import ReleaseError
from release.source import Source

_HOOK = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build(source: Source, into: Path) -> Path:
    """Returns the wheel's path. setuptools leaves its files in the tree, so this comes last. Raises ReleaseError."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(source.epoch), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _HOOK, str(into.absolute())],
        cwd=source.tree,
        env=environment,
        umask=0o022,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"setuptools could not build the wheel:\n{done.stderr.strip()[-2000:]}")
    [wheel] = into.glob("*.whl")
    return wheel
