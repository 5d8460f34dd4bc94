"""Forks the processes of the tests' gangs from a process that has imported torch, or torch and torch_xla, before.

A gang's process spends 2.7 of its 3 seconds of CPU on importing torch, and on the other backends 4.5 of 6.5 on
importing torch_xla as well; a test run starts hundreds of them. What is forked begins where `python -m MODULE` would,
only with these packages imported. It is real in everything else: a process with a session, an environment, a directory
and standard streams of its own, which imports this project's code itself, whose main thread runs MODULE as `__main__`,
and which the interpreter ends, unless all went well: then it leaves once the exit handlers have run, since taking the
interpreter apart would copy the server's pages, which costs as much as a small training. The processes that it starts
are fresh interpreters, for multiprocessing spawns them; where that is not the point, `FORKS_REPLICAS` has replicas
forked, too.

Why this is sound: the packages start no thread when they are imported (the server asserts it). They do read the
environment, so processes share a server only if their environments differ in nothing but variables that are read later
(`READ_LATER`). What a fork cannot show is what depends on the start of an interpreter: the seed of hashes, which forks
share, and the import of the packages itself. So each kind of gang is also started by the real command, in tests whose
names say so.

A server serves one test worker. It has a single thread, and ends with the worker, however that ends. With it end all
processes that it has forked.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, NoReturn

READ_LATER = (
    *("MASTER_", "TPUJOB_", "KUBEFLOW_", "STORAGE_EMULATOR_HOST"),
    *("CPU_NUM_DEVICES", "PJRT_CPU_ASYNC_CLIENT", "XLA_THREAD_POOL_SIZE"),
    *("TEST_", "HOOK_CALLS", "PYTEST_CURRENT_TEST"),
)
"""How variables begin that nothing reads while torch and torch_xla are imported, in Python or in C++."""

TORCH = ("google_crc32c", "safetensors.torch", "torch.utils.flop_counter", "torch", "torch._dynamo")
"""What a trainer imports on the torch backend: an optimizer's first step imports the last."""

LIGHTNING = (*TORCH, "pytorch_lightning", "torch_xla", "gcsfs")
"""What it imports besides for a LightningModule. Lightning's Trainer looks at the last two when it is made."""

XLA = (*TORCH, "torch_xla", "torch_xla.distributed.spmd", "torch_xla.debug.metrics")
"""What it imports on the other backends."""

FORKS_REPLICAS = "TEST_FORKS_REPLICAS"
"""Set for a forked host: modules of the tests that start its replicas fork them."""

_LONGEST_REQUEST = 1 << 17
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ForkedProcess:
    """A process of the server, with what the tests use of `subprocess.Popen`."""

    def __init__(self, channel: socket.socket, stdout: IO[str]) -> None:
        self.stdout = stdout
        self.returncode: int | None = None
        self._channel = channel
        self.pid = self._receive()

    def poll(self) -> int | None:
        with suppress(TimeoutError):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or minus the signal that ended the process."""
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                self.returncode = self._receive()
            except BlockingIOError as error:
                raise TimeoutError from error
            self._channel.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _receive(self) -> int:
        message = self._channel.recv(32)
        assert message, "the fork server has died"
        return int(message)


class ForkServer:
    """A server, seen from the test worker."""

    def __init__(self, packages: tuple[str, ...], env: Mapping[str, str], cwd: str) -> None:
        self._control, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.trainer.fork_server", str(end.fileno()), *packages],
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[end.fileno()],
                # Ctrl-C is for the test worker, whose end ends the server.
                start_new_session=True,
            )

    def fork(self, module: str, env: Mapping[str, str]) -> ForkedProcess:
        """Like `Popen([sys.executable, "-m", module], stdout=PIPE, stderr=STDOUT, start_new_session=True)`."""
        request = json.dumps({"module": module, "env": dict(env)}).encode()
        read_end, write_end = os.pipe()
        channel, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            socket.send_fds(self._control, [request], [write_end, its_end.fileno()])
        os.close(write_end)
        return ForkedProcess(channel, os.fdopen(read_end))

    def close(self) -> None:
        """Ends the server and what it has forked."""
        self._control.close()
        self._process.wait()


def start(packages: tuple[str, ...], module: str, env: Mapping[str, str], cwd: str) -> ForkedProcess:
    """`python -m module`, forked from this worker's server of `packages`."""
    early = {name: value for name, value in env.items() if not name.startswith(READ_LATER)}
    return _server(packages, tuple(sorted(early.items())), cwd).fork(module, env)


@functools.cache
def _server(packages: tuple[str, ...], env: tuple[tuple[str, str], ...], cwd: str) -> ForkServer:
    server = ForkServer(packages, dict(env), cwd)
    atexit.register(server.close)
    return server


@dataclass(frozen=True)
class _Running:
    pid: int
    pidfd: int
    answers: socket.socket

    def close(self) -> None:
        os.close(self.pidfd)
        self.answers.close()


def _serve(control: socket.socket, packages: list[str]) -> str:
    """Forks until the test worker has gone. Returns in the forked processes only: the module that they run."""
    # First, so that the packages' own exit handlers run before it.
    atexit.register(_leave_after_success)
    before = dict(os.environ)
    for package in packages:
        importlib.import_module(package)
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert len(os.listdir("/proc/self/task")) == 1, f"importing {packages} starts threads"
    # What the server has is never garbage: its processes need not look at it, which would copy it.
    gc.freeze()
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
            request, (output, answers) = json.loads(message), descriptors
            if (pid := os.fork()) == 0:
                os.setsid()
                _die_with(server)
                for other in running:
                    other.close()
                control.close()
                os.close(answers)
                _become(output, {**request["env"], **imported})
                return str(request["module"])
            os.close(output)
            started = _Running(pid, os.pidfd_open(pid), socket.socket(fileno=answers))
            running.add(started)
            selector.register(started.pidfd, selectors.EVENT_READ, started)
            _answer(started, pid)


def _report(ended: _Running) -> None:
    _, status = os.waitpid(ended.pid, 0)
    _answer(ended, os.waitstatus_to_exitcode(status))
    ended.close()


def _answer(process: _Running, number: int) -> None:
    # The test worker may be gone.
    with suppress(BrokenPipeError, ConnectionResetError):
        process.answers.send(str(number).encode())


def _end(running: set[_Running]) -> NoReturn:
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        os.waitpid(process.pid, 0)
    os._exit(0)


def _die_with(parent: int) -> None:
    """Dies when `parent` dies, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before sends no signal.
    if os.getppid() != parent:
        os._exit(1)


def _become(output: int, env: Mapping[str, str]) -> None:
    """Gives a fork what a started process has of its own."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [""]
    # Python seeds its own generator again after a fork.
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


def _run(module: str) -> None:
    """Notes whether it went well, and leaves the process's end to the interpreter."""
    global _succeeded
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        _succeeded = end.code in (None, 0)
        raise
    _succeeded = True


_succeeded = False


def _leave_after_success() -> None:
    """The last exit handler."""
    if _succeeded:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    _module = _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    # The last statement, so that the interpreter ends the process as it ends any other.
    _run(_module)
