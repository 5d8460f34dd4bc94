"""Child processes of a test cluster: started with a log and a pid file, awaited, and stopped by pid.

A child never outlives the process that started it (see `launch`), and its pid file holds enough for `directories` to
recognise it later without doubt.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.cluster.deadlines import deadline

LOG_TAIL_LINES = 30
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 0.5

_LAUNCHER = str(Path(__file__).with_name("launch.py"))

# PR_SET_PDEATHSIG fires when the *thread* that forked ends. One thread that lives as long as the process therefore
# forks all children, so a test may start or restart one from a short-lived thread.
_FORKING_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cluster-children")


class ProcessError(Exception):
    """A child ended early or was not ready in time; the message ends with the tail of its log."""


@dataclass(frozen=True)
class ProcessRecord:
    """What a pid file holds: enough to tell a process from a later one with the same pid.

    `start_ticks`: field 22 of /proc/PID/stat, clock ticks since boot (proc_pid_stat(5)).
    `argv`: the requested command, without the launcher in front of it.
    """

    pid: int
    start_ticks: int
    argv: tuple[str, ...]

    @classmethod
    def own(cls) -> "ProcessRecord":
        """The record of the calling process."""
        command = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
        ticks = start_ticks(os.getpid())
        assert ticks is not None, "a running process has a start time"
        return cls(os.getpid(), ticks, tuple(os.fsdecode(word) for word in command))

    @classmethod
    def read(cls, path: Path) -> "ProcessRecord | None":
        """The record in a pid file; None if a killed process left it half written or never wrote it."""
        try:
            fields = json.loads(path.read_text())
            return cls(int(fields["pid"]), int(fields["start_ticks"]), tuple(fields["argv"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"pid": self.pid, "start_ticks": self.start_ticks, "argv": self.argv}))

    def is_running(self) -> bool:
        """Whether exactly this process still runs: same pid, same start, same command line."""
        if start_ticks(self.pid) != self.start_ticks:
            return False
        try:
            raw = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False
        command = tuple(os.fsdecode(word) for word in raw.split(b"\0")[:-1])
        # Between fork and exec the command line begins with the launcher; while exec replaces the program it is empty.
        return not command or command[-len(self.argv) :] == self.argv

    def kill(self) -> None:
        """SIGKILL to exactly this process, if it still runs; returns when it has ended."""
        self.end(signal.SIGKILL)

    def end(self, with_signal: signal.Signals) -> None:
        """Sends a fatal signal to exactly this process, if it still runs; returns when it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The handle stays with one process, even if its pid is reused between the check and the signal.
            if self.is_running():
                signal.pidfd_send_signal(handle, with_signal)
                select.select([handle], [], [])
        finally:
            os.close(handle)


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets and may itself hold brackets and spaces.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def wait_until(condition: Callable[[], bool], *, timeout: float, what: str) -> None:
    """Polls `condition` until it holds, and less often the longer that takes: each time costs the API server something.

    Raises TimeoutError, naming `what`, after `timeout` seconds, or later under load (see `deadline`)."""
    started = time.monotonic()
    while not condition():
        # The load is looked at when the time is over: what slows a wait down may begin after the wait does.
        waited = time.monotonic() - started
        if waited > timeout and waited > deadline(timeout):
            raise TimeoutError(f"not so after {waited:.3g} s: {what}")
        time.sleep(min(max(POLL_SECONDS, waited / 10), LONGEST_POLL_SECONDS))


class Process(Protocol):
    """A process that a `Child` can be of: `subprocess.Popen` and the forked ones have this in common."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class Child:
    """One running child. Made by `Children`."""

    def __init__(self, name: str, argv: tuple[str, ...], process: Process, log: Path, pid_file: Path) -> None:
        self.name = name
        self.argv = argv
        self.log = log
        self._process = process
        self._pid_file = pid_file

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_ready(self, ready: Callable[[], bool], *, timeout: float) -> None:
        """Polls `ready`. Raises ProcessError when the child ends first or `timeout` seconds pass."""

        def ready_or_ended() -> bool:
            return self.has_ended or ready()

        try:
            wait_until(ready_or_ended, timeout=timeout, what=f"{self.name} is ready")
        except TimeoutError as late:
            raise ProcessError(f"{late}\n{self.log_tail()}") from None
        if self._process.returncode is not None:
            raise ProcessError(f"{self.name} ended with {self._process.returncode}\n{self.log_tail()}")

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"last lines of {self.log}:", *lines])

    def stop(self, grace: float) -> None:
        """SIGTERM, and SIGKILL when the child has not ended after `grace` seconds."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(deadline(grace))
        except (subprocess.TimeoutExpired, TimeoutError):
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._pid_file.unlink(missing_ok=True)


class Children:
    """The children of one cluster directory; their environment is `environment` alone."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = dict(environment)
        self._running: dict[str, Child] = {}

    def start(self, name: str, program: Path, *flags: str) -> Child:
        """Starts `program` as `name`; its output is appended to NAME.log. Does not wait for readiness."""
        argv = (str(program), *flags)
        child = self._begin(name, argv, lambda log: _FORKING_THREAD.submit(self._fork, argv, log).result())
        ticks = start_ticks(child.pid)
        if ticks is not None:
            ProcessRecord(child.pid, ticks, argv).write(self._directory / f"{name}.pid")
        return child

    def adopt(self, name: str, begin: Callable[[Path], Process]) -> Child:
        """Has a process begun as `name` that appends its output to the log, and dies with this one without help."""
        return self._begin(name, (), begin)

    def _begin(self, name: str, argv: tuple[str, ...], begin: Callable[[Path], Process]) -> Child:
        if name in self._running:
            raise ValueError(f"{name} runs already")
        log = self._directory / f"{name}.log"
        child = self._running[name] = Child(name, argv, begin(log), log, self._directory / f"{name}.pid")
        return child

    def _fork(self, argv: tuple[str, ...], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                launched(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._directory,
            )

    def stop(self, name: str, *, grace: float) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds; returns when the child has ended."""
        self._running.pop(name).stop(grace)

    def start_again(self, name: str, *, grace: float) -> None:
        """Stops the child and starts the same command."""
        program, *flags = self._running[name].argv
        self.stop(name, grace=grace)
        self.start(name, Path(program), *flags)

    def ended(self) -> set[str]:
        """The children that have ended though nobody has stopped them."""
        return {name for name, child in self._running.items() if child.has_ended}

    def stop_all(self, *, grace: float) -> None:
        """Stops the newest first: later children depend on earlier ones."""
        for name in reversed(list(self._running)):
            self.stop(name, grace=grace)


def launched(argv: tuple[str, ...]) -> list[str]:
    """The command that runs `argv` so that it dies with this process; argv[0] is an absolute path."""
    return [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *argv]
