"""Forks the processes of the tests' gangs from a process that has imported torch, or torch and torch_xla, before.

A gang's process spends 2.7 of its 3 seconds of CPU on importing torch, and on the other backends 4.5 of 6.5 on
importing torch_xla as well; a test run starts hundreds of them. The server is local mode's
(`tpu_training_operator.local.fork_server`, which says why this is sound). The processes that it starts are fresh
interpreters, for multiprocessing spawns them; where that is not the point, `FORKS_REPLICAS` has replicas forked, too.

Processes share a server only if their environments differ in nothing but variables that are read after the imports
(`READ_LATER`). What a fork cannot show is what depends on the start of an interpreter, or on its end after a success:
the seed of hashes, which forks share, the imports, and how they are taken apart. So each kind of gang is also started
by the real command, in tests whose names say so. Each test worker has servers of its own, which are forked from those
of all workers that have made the imports (`shared_imports`).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from tpu_training_operator.local.fork_server import LONGEST_ANSWER, request

READ_LATER = (
    *("MASTER_", "TPUJOB_", "KUBEFLOW_", "STORAGE_EMULATOR_HOST", "TPU_LOG_DIR"),
    *("CPU_NUM_DEVICES", "PJRT_CPU_ASYNC_CLIENT", "XLA_THREAD_POOL_SIZE", "LIBTPU_INIT_ARGS"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_"),
    *("PYTEST_", "TPU_TRAINER_", "TEST_", "HOOK_CALLS", "SCRIPT_FOLDER", "MAX_STEPS", "TORCHINDUCTOR_CACHE_DIR"),
    *("CUDA_VISIBLE_DEVICES", "TMPDIR"),
)
"""How variables begin that nothing reads while torch and torch_xla are imported, in Python or in C++."""

TORCH = (
    *("google_crc32c", "safetensors.torch", "torch.utils.flop_counter", "torch"),
    *("tpu_trainer.worker.entry", "tpu_trainer.worker.replica", "tpu_trainer.gang.backends.torch_dist"),
)
"""What a trainer imports on the torch backend."""

COMPILER = (
    *(*TORCH, "torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp"),
    "torch.utils.cpp_extension",
)
"""What it imports besides for trainer.torch.execution: Compile."""

XLA = (*TORCH, "torch_xla", "torch_xla.distributed.spmd", "torch_xla.debug.metrics", "tpu_trainer.gang.backends.xla")
"""What it imports on the other backends."""

FRAMEWORKS = (
    *(*XLA, "gcsfs", "pytorch_lightning", "torchmetrics.classification", "transformers.trainer", "accelerate"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.vit.modeling_vit", "sklearn.datasets"),
    *("tpu_training_operator.cli.run.run", "tpu_training_operator.local.run"),
)
"""What a LightningModule, a training script and `tpujob run` import. Lightning's Trainer looks at torch_xla and gcsfs
when it is made."""

FORKS_REPLICAS = "TEST_FORKS_REPLICAS"
"""Set for a forked host: modules of the tests that start its replicas fork them."""


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
        message = self._channel.recv(LONGEST_ANSWER)
        assert message, "the fork server has died"
        return int(message)


class ForkServer:
    """A server, seen from its test worker. Workers that ask for the same get one each, forked from the same imports."""

    def __init__(self, packages: tuple[str, ...], env: Mapping[str, str], cwd: str, python: str) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
        name = repr((run, packages, sorted(env.items()), cwd, python))
        # An abstract address, which nothing has to remove.
        address = f"\0{hashlib.sha256(name.encode()).hexdigest()}"
        self._imports: subprocess.Popen[bytes] | None = None
        self._control = _socket()
        while self._control.connect_ex(address):
            # Another worker may be the first after all.
            with _socket() as listener, suppress(OSError):
                listener.bind(address)
                listener.listen()
                self._imports = _import(listener.fileno(), packages, env, cwd, python)

    @property
    def made_the_imports(self) -> bool:
        """Whether this worker was the first that asked for them."""
        return self._imports is not None

    def fork(self, module: str, env: Mapping[str, str]) -> ForkedProcess:
        """Like `Popen([sys.executable, "-m", module], stdout=PIPE, stderr=STDOUT, start_new_session=True)`."""
        read_end, write_end = os.pipe()
        channel = request(self._control, module, env, write_end)
        os.close(write_end)
        return ForkedProcess(channel, os.fdopen(read_end))

    def close(self) -> None:
        """Ends the server and what it has forked."""
        self._control.shutdown(socket.SHUT_WR)
        while self._control.recv(1):
            pass
        self._control.close()
        if self._imports is not None:
            self._imports.communicate()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _import(
    listener: int, packages: tuple[str, ...], env: Mapping[str, str], cwd: str, python: str
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [python, "-m", "tests.trainer.shared_imports", str(listener), *packages],
        env=env,
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener],
        # Ctrl-C is for the test worker, whose end ends this.
        start_new_session=True,
    )


def start(
    packages: tuple[str, ...], module: str, env: Mapping[str, str], cwd: str, python: str = sys.executable
) -> ForkedProcess:
    """`python -m module`, forked from this worker's server of `packages`."""
    early = {name: value for name, value in env.items() if not name.startswith(READ_LATER)}
    with _STARTING:
        server = _server(packages, tuple(sorted(early.items())), cwd, python)
    return server.fork(module, env)


_STARTING = threading.Lock()
"""Two threads that ask first at the same time would start two servers."""


@functools.cache
def _server(packages: tuple[str, ...], env: tuple[tuple[str, str], ...], cwd: str, python: str) -> ForkServer:
    server = ForkServer(packages, dict(env), cwd, python)
    atexit.register(server.close)
    return server
