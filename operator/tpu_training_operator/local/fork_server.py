"""Imports packages once, and forks processes that run a module with them, which saves each of them seconds.

A fork begins where `python -m MODULE` would, with these packages imported. Otherwise it is an ordinary process: it has
its own session, environment and standard streams, and its main thread runs MODULE as `__main__`. After a failure the
interpreter ends it. After a success it exits as soon as the exit handlers have run: finalizing the interpreter would
copy the server's pages, which costs as much as a small training. Processes that multiprocessing spawns are fresh
interpreters.

This is sound as long as the imports start no thread and read no variable in which the processes differ. The server
checks the first and exits otherwise; the client ensures the second. Forks share what an interpreter sets at its start:
the seed of hashes, and the imports.

`python -m tpu_training_operator.local.fork_server FD PACKAGE...`: FD is a socket for requests (`request`). The server
has one thread and ends when its client ends, in whatever way. Then all processes that it has forked end, too.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

LONGEST_ANSWER = 32

_LONGEST_REQUEST = 1 << 17
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def request(control: socket.socket, module: str, env: Mapping[str, str], output: int) -> socket.socket:
    """Asks for a process that runs `module` and writes to `output`. The socket returned receives its pid and, once it
    has ended, its exit code or minus the signal that ended it; it is closed without them if the server has ended.

    Raises:
        OSError: the environment is too long, or the server has ended.
    """
    message = json.dumps({"module": module, "env": dict(env)}).encode()
    if len(message) > _LONGEST_REQUEST:
        raise OSError("the environment is too long")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            socket.send_fds(control, [message], [output, theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours


@dataclass(frozen=True)
class _Running:
    pid: int
    pidfd: int
    answers: socket.socket

    def close(self) -> None:
        os.close(self.pidfd)
        self.answers.close()


def serve(control: socket.socket, imported: Mapping[str, str]) -> str:
    """Forks processes until the client is gone. Returns only in a forked process, with the module to `run`.

    imported: what `import_packages` has returned.
    """
    server, selector, running = os.getpid(), selectors.PollSelector(), set[_Running]()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if (ended := key.data) is not None:
                selector.unregister(ended.pidfd)
                running.remove(ended)
                _report(ended)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _LONGEST_REQUEST, 2)
            if not message:
                _end(running)
            order, (output, answers) = json.loads(message), descriptors
            channel = socket.socket(fileno=answers)
            try:
                pid = os.fork()
            except OSError:
                # No process or memory left. The client sees that there is no answer.
                os.close(output)
                channel.close()
                continue
            if pid == 0:
                os.setsid()
                _die_with(server)
                # Only now, because a client that knows the pid may signal the session.
                _answer(channel, os.getpid())
                channel.close()
                control.close()
                for other in running:
                    other.close()
                _become(output, {**order["env"], **imported})
                return str(order["module"])
            os.close(output)
            started = _Running(pid, os.pidfd_open(pid), channel)
            running.add(started)
            selector.register(started.pidfd, selectors.EVENT_READ, started)


def import_packages(packages: Iterable[str]) -> dict[str, str]:
    """Imports the packages; returns the variables that they have set."""
    # First, so that the packages' own exit handlers run before it.
    atexit.register(_leave_after_success)
    before = dict(os.environ)
    for package in packages:
        importlib.import_module(package)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise SystemExit(f"cannot fork: the imports have started {threads - 1} threads")
    # Otherwise every process would print what is still buffered.
    sys.stdout.flush()
    sys.stderr.flush()
    # The collector of a forked process need not look at the server's objects, which would copy their pages.
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _report(ended: _Running) -> None:
    _, status = os.waitpid(ended.pid, 0)
    _answer(ended.answers, os.waitstatus_to_exitcode(status))
    ended.close()


def _answer(answers: socket.socket, number: int) -> None:
    # The client may be gone.
    with suppress(BrokenPipeError, ConnectionResetError):
        answers.send(str(number).encode())


def _end(running: Iterable[_Running]) -> NoReturn:
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        os.waitpid(process.pid, 0)
    os._exit(0)


def _die_with(parent: int) -> None:
    """Makes this process die when `parent` dies, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the call sends no signal.
    if os.getppid() != parent:
        os._exit(1)


def _become(output: int, env: Mapping[str, str]) -> None:
    """Gives a fork its own output, environment, arguments and random seed."""
    _copy_what_the_imports_printed(output)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [""]
    # Python seeds its own generator again after a fork.
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


def _copy_what_the_imports_printed(output: int) -> None:
    # Printed by the server, whose output is a file: each process would have printed it, too.
    with suppress(OSError):
        os.write(output, os.pread(1, 1 << 16, 0))


def run(module: str) -> None:
    """Runs the module and records whether it succeeded."""
    global _succeeded
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        _succeeded = end.code in (None, 0)
        raise
    _succeeded = True


_succeeded = False


def _leave_after_success() -> None:
    """Ends a successful process without finalizing the interpreter. Runs as the last exit handler."""
    if _succeeded:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    _module = serve(socket.socket(fileno=int(sys.argv[1])), import_packages(sys.argv[2:]))
    # The last statement, so that the interpreter ends the process as it ends any other.
    run(_module)
