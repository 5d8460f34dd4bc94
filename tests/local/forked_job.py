"""`tpujob` with the arguments TEST_ARGUMENTS, whose workers that run the trainer are forked from its own process.

Local mode forks workers of large gangs from a server that makes the imports; this one's are made before it begins.
"""

import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from tpu_training_operator.api.constants import TRAINER_COMMAND
from tpu_training_operator.cli.main import main
from tpu_training_operator.local import forks
from tpu_training_operator.local.fork_server import run, serve
from tpu_training_operator.local.worker_process import WorkerProcess

_COMMAND = "TEST_COMMAND"
_fork, _length = forks.Forks.fork, len(TRAINER_COMMAND)


async def fork(self: forks.Forks, command: Sequence[str], env: Mapping[str, str], log: Path) -> WorkerProcess | None:
    if list(command[:_length]) != TRAINER_COMMAND:
        return None
    return await _fork(self, TRAINER_COMMAND, {**env, _COMMAND: json.dumps(command[_length:])}, log)


def server() -> socket.socket:
    """Returns the socket for requests of a server with all that this process has imported."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        module = serve(theirs, {})
        sys.argv[1:] = json.loads(os.environ[_COMMAND])
        run(module)
    theirs.close()
    return ours


if __name__ == "__main__":
    # The imports have looked for the folder before TMPDIR was what it is.
    tempfile.tempdir = None
    start = mock.AsyncMock(return_value=server())
    sys.argv[1:] = json.loads(os.environ["TEST_ARGUMENTS"])
    with mock.patch.multiple(forks.Forks, fork=fork, _start=start), mock.patch.object(forks, "gains"):
        main()
