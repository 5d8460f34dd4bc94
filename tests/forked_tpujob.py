"""Starts `tpujob` as a process that is forked from one that has imported its commands: they are 0.9 of its CPU-seconds.

The fork server is that of the trainer's tests, which says what a fork cannot show.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.layers import STARTED_WITH
from tests.trainer import fork_server

_REPOSITORY = Path(__file__).parents[1]
_ORDER = "TEST_TPUJOB"
_CLI = "tpu_training_operator.cli"
_PACKAGES = (
    f"{_CLI}.main",
    *(f"{_CLI}.run.{module}" for module in ("run", "submit", "lifecycle", "check_slice")),
    f"{_CLI}.watch.status",
    "tpu_training_operator.local.run",
)


def start(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: str, stderr: str
) -> fork_server.ForkedProcess:
    """Returns the process of `tpujob` with these arguments, without a terminal; both its streams are files."""
    order = json.dumps([[*arguments], str(cwd), dict(env), stdout, stderr])
    given = {**STARTED_WITH, _ORDER: order}
    process = fork_server.start(_PACKAGES, __name__, given, str(_REPOSITORY))
    process.stdout.close()
    return process


def _main() -> None:
    from tpu_training_operator.cli.main import main

    arguments, cwd, env, *streams = json.loads(os.environ[_ORDER])
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_APPEND), number)
    sys.argv[1:] = arguments
    main()


if __name__ == "__main__":
    _main()
