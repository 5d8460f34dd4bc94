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
from tpu_training_operator.local.fork_server import LONGEST_ANSWER, request
from tpu_training_operator.local.worker_process import WorkerProcess, die_with_parent

_SMALLEST_GANG = 3
# Every worker imports these; an optimizer's first step imports torch._dynamo.
_TORCH = ("tpu_trainer.worker.replica", "tpu_trainer.gang.backends.torch_dist", "torch._dynamo")
_XLA = ("tpu_trainer.worker.replica", "tpu_trainer.gang.backends.xla")
_DIFFER = ("TPUJOB_", "KUBEFLOW_TRAINER_", "MASTER_", "MEGASCALE_", "TPU_WORKER_ID", "JOB_COMPLETION_INDEX")
"""The prefixes of variables that differ between hosts and attempts. The imports above do not read them."""


class Forks:
    """The fork server of one run, started with the first worker that it can fork."""

    def __init__(self) -> None:
        self._server: _ForkServer | None = None
        self._given_up: list[_ForkServer] = []
        self._times_given_up = 0
        self._environment: dict[str, str] | None = None
        self._turn = asyncio.Lock()

    async def fork(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> WorkerProcess | None:
        """Forks a process like one that `command` starts, with its output in `log`; None if it has to be started."""
        if not gains(command, env):
            return None
        variables = _import_variables(env)
        self._environment = self._environment or variables
        if variables != self._environment:
            return None
        # One at a time: the server answers in milliseconds, and its socket holds only so many environments.
        async with self._turn:
            with contextlib.suppress(OSError):
                server = self._server or await self._start(env)
                with log.open("wb") as output:
                    process = await server.fork(command[-1], env, output.fileno())
                return WorkerProcess(process) if process is not None else None
        return None

    async def _start(self, env: Mapping[str, str]) -> "_ForkServer":
        times = self._times_given_up
        self._server = server = await _ForkServer.start(_imports(env), env)
        if times != self._times_given_up:
            # Given up while it started.
            self.give_up()
        return server

    def give_up(self) -> None:
        """Ends the server if it still imports, so that workers waiting for it stop. A later attempt starts another."""
        self._times_given_up += 1
        if self._server is not None and not self._server.has_forked:
            self._server.kill()
            self._given_up.append(self._server)
            self._server = None

    async def close(self) -> None:
        """Ends the server and all that it has forked."""
        self.give_up()
        for server in filter(None, (*self._given_up, self._server)):
            await server.close()


def gains(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether it saves time to fork what `command` would start."""
    is_large = int(env[protocol.ENV_NUM_HOSTS]) >= _SMALLEST_GANG and env[protocol.ENV_HOST_INDEX] != "0"
    return is_large and list(command) == TRAINER_COMMAND and sys.platform == "linux"


def _imports(env: Mapping[str, str]) -> Sequence[str]:
    run_spec = json.loads(Path(env[protocol.ENV_RUN_SPEC]).read_text(encoding="utf-8"))
    return _TORCH if run_spec["backend"] == "torch" else _XLA


def _import_variables(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_DIFFER)}


class _ForkServer:
    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self.has_forked = False

    @classmethod
    async def start(cls, packages: Sequence[str], env: Mapping[str, str]) -> "_ForkServer":
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A file, because what the imports print belongs in every log.
        with theirs, tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tpu_training_operator.local.fork_server", str(theirs.fileno()), *packages),
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return cls(process, control)

    async def fork(self, module: str, env: Mapping[str, str], output: int) -> "_Forked | None":
        """Forks a process; None if the server has ended. The first call waits for the imports."""
        answers = request(self._control, module, env, output)
        answers.setblocking(False)
        pid = await asyncio.get_running_loop().sock_recv(answers, LONGEST_ANSWER)
        if not pid:
            answers.close()
            return None
        self.has_forked = True
        return _Forked(int(pid), answers)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        self._control.close()
        await self._process.wait()


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
            code = await asyncio.get_running_loop().sock_recv(answers, LONGEST_ANSWER)
        except ConnectionResetError:
            code = b""
    # Without the server, its processes are killed.
    return int(code) if code else -signal.SIGKILL
