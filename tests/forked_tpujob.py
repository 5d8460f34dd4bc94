"""Starts `tpujob` as a process that is forked from one that has imported its commands: they are 0.9 of its CPU-seconds.

The fork server is that of the trainer's tests, which says what a fork cannot show.
"""

import io
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
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str], streams: Mapping[int, str]
) -> fork_server.ForkedProcess:
    """Returns the process of `tpujob` with these arguments.

    Its descriptors in `streams` are these files or terminals. Else stdin is empty, and the others are its `stdout`.
    """
    order = json.dumps([[*arguments], str(cwd), dict(env), [*streams.items()]])
    given = {**STARTED_WITH, _ORDER: order}
    process = fork_server.start(_PACKAGES, __name__, given, str(_REPOSITORY))
    if streams.keys() >= {1, 2}:
        process.stdout.close()
    return process


def _main() -> None:
    from tpu_training_operator.cli.main import main

    arguments, cwd, env, streams = json.loads(os.environ[_ORDER])
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, stream in streams:
        access = os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(stream, access | os.O_NOCTTY), number)
    # As an interpreter would have begun.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    sys.argv[1:] = arguments
    main()


if __name__ == "__main__":
    _main()
