"""One simulated machine: processes with their own pids, mounts and network, which all end with its first process.

Each node has one. Killing the first process is pulling the plug: the kernel then kills every process inside,
containers included, and drops the mounts and the network interfaces. The first process dies with the process that
started it, so a killed test run leaves nothing running and nothing mounted.
"""

import sys
from pathlib import Path

from tests.cluster.processes import Child, Children, ProcessRecord, start_ticks

START_SECONDS = 20.0
# The programs to stop have lost their other half inside and end by themselves.
STOP_SECONDS = 10.0

_FIRST_PROCESS = str(Path(__file__).with_name("machine_init.py"))
_ENTER = str(Path(__file__).with_name("machine_enter.py"))
_UNSHARE = Path("/usr/bin/unshare")


class Machine:
    """start() makes it, with an empty network namespace (see `network.connect`)."""

    def __init__(self, children: Children, directory: Path, name: str) -> None:
        self.name = name
        self._children = children
        self._directory = directory
        self._first: ProcessRecord | None = None
        self._programs: list[str] = []

    @property
    def pid(self) -> int:
        """The pid of the first process, as seen from outside."""
        assert self._first is not None, f"{self.name} is not running"
        return self._first.pid

    def start(self) -> None:
        """Raises ProcessError."""
        private = self._directory / "private"
        command = (sys.executable, "-I", "-S", _FIRST_PROCESS, str(private))
        unshare = self._children.start(
            self.name,
            _UNSHARE,
            "--pid",
            "--fork",
            "--kill-child",
            "--net",
            "--mount",
            "--propagation=slave",
            "--mount-proc",
            *command,
        )
        ready = private / "ready"
        ready.unlink(missing_ok=True)
        unshare.wait_ready(ready.exists, timeout=START_SECONDS)
        pid = int(Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text())
        ticks = start_ticks(pid)
        assert ticks is not None, "a machine that said it is ready runs"
        self._first = ProcessRecord(pid, ticks, command)
        self._first.write(self._directory.parent / f"{self.name}-first-process.pid")

    def run(self, name: str, program: Path, *flags: str) -> Child:
        """Starts a program inside, as a child that can be stopped by name like any other."""
        enter = ("-I", "-S", _ENTER, str(self.pid), str(program))
        child = self._children.start(name, Path(sys.executable), *enter, *flags)
        self._programs.append(name)
        return child

    def stop(self, name: str, *, grace: float) -> None:
        """SIGTERM to a program inside, and SIGKILL after `grace` seconds."""
        self._programs.remove(name)
        self._children.stop(name, grace=grace)

    @property
    def problem(self) -> str | None:
        if self._first is None:
            return f"{self.name} does not run"
        ended = {self.name, *self._programs} & self._children.ended()
        return f"{', '.join(sorted(ended))} ended" if ended else None

    def kill(self) -> None:
        """Returns when no process of the machine is left. Does nothing if it never started."""
        if self._first is None:
            return
        self._first.kill()
        for name in (*self._programs, self.name):
            self._children.stop(name, grace=STOP_SECONDS)
        self._programs.clear()
        self._first = None
