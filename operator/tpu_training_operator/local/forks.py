"""Forks the workers of a large enough gang from one process that has imported torch.

A worker of the trainer spends most of its start on imports, and a laptop has fewer cores than a gang has hosts. Host 0
still starts by the real command, on another core than the process that imports for the others. It has another hash
seed, so the rehearsal finds data whose order depends on hashes. A gang of two hosts would gain nothing and is not
forked, nor is a user's own command.

If a worker cannot be forked, `fork` returns None, and the real command shows what is wrong, if anything is.
"""

import asyncio
import contextlib
import json
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_contract import protocol
from tpu_training_operator.api.constants import TRAINER_COMMAND
from tpu_training_operator.local import fork_server
from tpu_training_operator.local.worker_process import WorkerProcess, die_with_parent

_SMALLEST_GANG = 3
# Every worker imports these.
_TORCH = ("tpu_trainer.worker.replica", "tpu_trainer.gang.backends.torch_dist")
_XLA = ("tpu_trainer.worker.replica", "tpu_trainer.gang.backends.xla")
_DIFFER = ("TPUJOB_", "KUBEFLOW_TRAINER_", "MASTER_", "MEGASCALE_", "TPU_WORKER_ID", "JOB_COMPLETION_INDEX")
"""The prefixes of variables that differ between hosts and attempts. The imports above do not read them."""


class Forks:
    """The fork server of one run, started with the first worker that it can fork."""

    def __init__(self) -> None:
        self._server: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._environment: dict[str, str] | None = None
        self._turn = asyncio.Lock()
        self._has_forked = self._is_given_up = False

    async def fork(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> WorkerProcess | None:
        """Forks a process like one that `command` starts, with its output in `log`; None if it has to be started. The
        first call waits for the imports."""
        if self._is_given_up or not gains(command, env):
            return None
        variables = {name: value for name, value in env.items() if not name.startswith(_DIFFER)}
        self._environment = self._environment or variables
        if variables != self._environment:
            return None
        # One at a time: the server answers in milliseconds, and its socket holds only so many environments.
        async with self._turn:
            with contextlib.suppress(OSError):
                control = self._control or await self._start(env)
                with log.open("wb") as output:
                    answers = fork_server.request(control, command[-1], env, output.fileno())
                answers.setblocking(False)
                if pid := await asyncio.get_running_loop().sock_recv(answers, fork_server.LONGEST_ANSWER):
                    self._has_forked = True
                    return WorkerProcess(_Forked(int(pid), answers))
                # The server has ended.
                answers.close()
        return None

    async def _start(self, env: Mapping[str, str]) -> socket.socket:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A file, because what the imports print belongs in every log.
        with theirs, tempfile.TemporaryFile() as output:
            self._server = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "tpu_training_operator.local.fork_server",
                    str(theirs.fileno()),
                    *_imports(env),
                ),
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        if self._is_given_up:
            # While it started.
            self._server.kill()
        return self._control

    def give_up(self) -> None:
        """Ends a server that still imports, so that workers waiting for it stop. Later ones are started."""
        if not self._has_forked:
            self._is_given_up = True
            if self._server is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._server.kill()

    async def close(self) -> None:
        """Ends the server and all that it has forked."""
        self.give_up()
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            await self._server.wait()


def gains(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Returns whether it saves time to fork what `command` would start."""
    is_large = int(env[protocol.ENV_NUM_HOSTS]) >= _SMALLEST_GANG and env[protocol.ENV_HOST_INDEX] != "0"
    return is_large and list(command) == TRAINER_COMMAND and sys.platform == "linux"


def _imports(env: Mapping[str, str]) -> Sequence[str]:
    run_spec = json.loads(Path(env["TPUJOB_RUN_SPEC"]).read_text(encoding="utf-8"))
    return _TORCH if run_spec["backend"] == "torch" else _XLA


class _Forked:
    """A process of the server."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self._code = asyncio.create_task(_exit_code(answers))

    async def wait(self) -> int:
        # A cancelled wait leaves other waits alone.
        return await asyncio.shield(self._code)


async def _exit_code(answers: socket.socket) -> int:
    with answers:
        try:
            code = await asyncio.get_running_loop().sock_recv(answers, fork_server.LONGEST_ANSWER)
        except ConnectionResetError:
            code = b""
    # Without the server, its processes are killed.
    return int(code) if code else -signal.SIGKILL
