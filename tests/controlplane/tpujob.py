"""Runs `tpujob`, forked.

The stories that type at a terminal, interrupt a command, or choose its kubeconfig by a variable start the interpreter
themselves, as do the tests in tests/unit/cli.
"""

import os
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

from tests import forked_tpujob

PROGRAM = "from tpu_training_operator.cli.main import main; main()"


def tpujob(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Returns what the command with these arguments has printed, without a terminal, and its exit status."""
    with NamedTemporaryFile("r") as stdout, NamedTemporaryFile("r") as stderr:
        process = forked_tpujob.start(arguments, Path.cwd(), os.environ, stdout.name, stderr.name)
        return subprocess.CompletedProcess(arguments, process.wait(), stdout.read(), stderr.read())
