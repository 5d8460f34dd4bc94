"""Starts a worker as a process, waits for it and stops it."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

_PR_SET_PDEATHSIG = 1


class Process(Protocol):
    """A process that leads a session."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Waits and returns the exit code, or minus the signal that ended the process. Several callers may wait."""
        ...


class WorkerProcess:
    """A process in its own session, so that Ctrl-C reaches only `tpujob`, which stops the gang in order."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @staticmethod
    async def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> "WorkerProcess":
        """Starts the command with its output in `log`. Raises OSError when it cannot be started."""
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        return WorkerProcess(process)

    async def wait(self) -> int:
        """Waits and returns the exit code as a container runtime reports it: 128 + N after signal N.

        All processes that the worker started end with it, as in a container.
        """
        code = await self._process.wait()
        self.kill()
        return code if code >= 0 else 128 - code

    async def stop(self, grace_seconds: float) -> None:
        """Sends SIGTERM, and SIGKILL if the process still runs after the grace period."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # To the session, so that the worker's children do not outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def die_with_parent() -> None:
    # Even a killed tpujob leaves no worker behind. This runs between fork and exec, where imports are unsafe.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_libc = ctypes.CDLL(None)
