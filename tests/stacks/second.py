"""Starts Python on the second stack: TorchTPU and its torch, without torch_xla."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.layers import SECOND_STACK, STARTED_WITH

ROOT = Path(__file__).parents[2]
LIMIT = 1800.0
"""Seconds, several times what the longest run takes on two loaded cores."""


def environment(**env: str) -> dict[str, str]:
    """What the test run was started with, without what is the first stack's. Torch would import TorchTPU in every
    process on its own; most tests need torch alone, and save the ten seconds."""
    kept = {name: value for name, value in STARTED_WITH.items() if not name.startswith(("TPUJOB_", "PJRT_"))}
    paths = (ROOT / "contract", ROOT / "trainer_image", ROOT / "operator", ROOT)
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        **env,
    }


def run(*arguments: str, given: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SECOND_STACK), *arguments],
        input=given,
        env=environment(**env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
