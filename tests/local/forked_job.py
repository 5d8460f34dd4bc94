"""`tpujob` with the arguments TEST_ARGUMENTS, whose workers are forked from its own process before it runs.

Local mode forks workers of gangs from a server that makes the imports. This one's are made before `tpujob` is forked.
"""

import json
import os
import socket
import sys
from unittest import mock

from tpu_training_operator.api.constants import TRAINER_COMMAND
from tpu_training_operator.cli.main import main
from tpu_training_operator.local import forks
from tpu_training_operator.local.fork_server import run, serve


def _server() -> socket.socket:
    """Returns the socket for requests of a server with all that this process has imported."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        run(serve(theirs, {}))
    theirs.close()
    return ours


if __name__ == "__main__":
    _start = mock.AsyncMock(return_value=_server())
    sys.argv[1:] = json.loads(os.environ["TEST_ARGUMENTS"])
    with mock.patch.object(forks.Forks, "_start", _start), mock.patch.object(forks, "gains") as _gains:
        _gains.side_effect = lambda command, env: command == TRAINER_COMMAND
        main()
