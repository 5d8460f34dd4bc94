"""Runs `tpujob`, forked.

The story that chooses its kubeconfig by a variable starts the interpreter itself, as do the tests in tests/unit/cli
that interrupt a command, close its pipe or give it a terminal.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

from tests import forked_tpujob
from tests.trainer.fork_server import ForkedProcess

PROGRAM = "from tpu_training_operator.cli.main import main; main()"


def tpujob(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Returns what the command with these arguments has printed, without a terminal, and its exit status.

    `env`: variables besides this process's.
    """
    with NamedTemporaryFile("r") as stdout, NamedTemporaryFile("r") as stderr:
        process = start({1: stdout.name, 2: stderr.name}, *arguments, **env)
        return subprocess.CompletedProcess(arguments, process.wait(), stdout.read(), stderr.read())


def start(streams: Mapping[int, str], *arguments: str, **env: str) -> ForkedProcess:
    """`streams`: see `forked_tpujob`."""
    return forked_tpujob.start(arguments, Path.cwd(), {**os.environ, **env}, streams)
