"""Imports packages once for all workers of a test run, and forks a fork server for each.

`python -m tests.trainer.shared_imports FD PACKAGE...`: FD is a listening socket. Each worker that connects has a server
of its own (`tpu_training_operator.local.fork_server`), which ends with the connection. This process ends when its stdin
does, with the worker that has started it; the others keep their servers.
"""

import os
import selectors
import socket
import sys
from contextlib import suppress

from tpu_training_operator.local.fork_server import import_packages, run, serve


def _accept(listener: socket.socket) -> socket.socket:
    """Forks a process for each connection. Returns only in these, with the connection."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    while all(key.fileobj is listener for key, _ in selector.select()):
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        connection, _ = listener.accept()
        if os.fork() == 0:
            selector.close()
            listener.close()
            with open(os.devnull, "rb") as empty:
                os.dup2(empty.fileno(), 0)
            return connection
        connection.close()
    os._exit(0)


if __name__ == "__main__":
    _imported = import_packages(sys.argv[2:])
    _module = serve(_accept(socket.socket(fileno=int(sys.argv[1]))), _imported)
    # The last statement, so that the interpreter ends the process as it ends any other.
    run(_module)
