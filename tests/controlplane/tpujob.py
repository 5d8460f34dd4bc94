"""Runs `tpujob` in a process that is forked from one that has imported its commands, which are 0.9 of its CPU-seconds.

The fork server is that of the trainer's tests, which says what a fork cannot show. The stories that type at a terminal,
interrupt a command, or choose its kubeconfig by a variable start the interpreter themselves, as do the tests in
tests/unit/cli.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.trainer import fork_server

PROGRAM = "from tpu_training_operator.cli.main import main; main()"

_REPOSITORY = Path(__file__).parents[2]
_ORDER = "TEST_TPUJOB"
_CLI = "tpu_training_operator.cli"
_PACKAGES = (
    f"{_CLI}.main",
    *(f"{_CLI}.run.{module}" for module in ("submit", "lifecycle", "check_slice")),
    f"{_CLI}.watch.status",
)


def tpujob(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Returns what the command with these arguments has printed, without a terminal, and its exit status."""
    with tempfile.NamedTemporaryFile("r") as stderr:
        order = json.dumps([stderr.name, arguments])
        process = fork_server.start(_PACKAGES, __name__, {**os.environ, _ORDER: order}, str(_REPOSITORY))
        with process.stdout:
            stdout = process.stdout.read()
        return subprocess.CompletedProcess(arguments, process.wait(), stdout, stderr.read())


def _main() -> None:
    from tpu_training_operator.cli.main import main

    stderr, arguments = json.loads(os.environ.pop(_ORDER))
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    sys.argv[1:] = arguments
    main()


if __name__ == "__main__":
    _main()
