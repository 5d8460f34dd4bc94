"""Starts `tpujob run` as a process on a job whose workers run a script from the test, and receives their messages.

It is forked, unless a test asks for the real command. A worker tells a test something with a file that it creates
atomically: `tell(what, value)` there, `told(what)` here.
"""

import json
import os
import re
import signal
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import forked_tpujob
from tests.cluster.deadlines import deadline
from tests.cluster.processes import wait_until
from tests.contract.jobs import Object, job_body
from tests.trainer.fork_server import ForkedProcess

DEADLINE = 60.0
"""Seconds after which a test gives up on an event; no result depends on how fast one is."""

TPUJOB = Path(sysconfig.get_path("scripts")) / "tpujob"

_PAGE = Path(__file__).parents[2] / "docs" / "progress.md"
[REPORTER] = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
"""Code that defines `report(step, **more)`, which the documentation gives for a user's own loop."""

_SLICES = {1: "v5litepod-4", 2: "v5litepod-8", 4: "v5litepod-16"}
_PRELUDE = """\
import json, os, pathlib, signal, socket, subprocess, sys, time

HERE = pathlib.Path(__file__).parent
HOST, ATTEMPT = int(os.environ["TPUJOB_HOST_INDEX"]), int(os.environ["TPUJOB_ATTEMPT"])

def tell(what, value=None):
    unfinished = HERE / f"told.{what}.{ATTEMPT}.{HOST}.unfinished"
    unfinished.write_text(json.dumps(value))
    unfinished.rename(unfinished.with_suffix(".json"))

def wait_forever():
    while True:
        signal.pause()

tell("started", {"pid": os.getpid(), "env": dict(os.environ)})
"""
_FROM_THE_SHELL_OF_THE_TESTS = ("TPUJOB_", "PJRT_", "MASTER_", "OMP_NUM_THREADS", "PYTHONPATH")


class Run:
    """One `tpujob run` in its own directory; its results are in `out`."""

    process: subprocess.Popen[bytes] | ForkedProcess

    def __init__(self, directory: Path, arguments: list[str], environ: Mapping[str, str], is_real: bool) -> None:
        self.directory = directory
        self.out = directory / "out"
        self._stdout, self._stderr = directory / "stdout.txt", directory / "stderr.txt"
        kept = {n: v for n, v in os.environ.items() if not n.startswith(_FROM_THE_SHELL_OF_THE_TESTS)}
        command, env = ["run", "-f", "job.json", *arguments], {**kept, **environ}
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            if not is_real:
                self.process = forked_tpujob.start(command, directory, env, {1: stdout.name, 2: stderr.name})
                return
            self.process = subprocess.Popen(
                [TPUJOB, *command],
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # Its own process group, as a shell makes for a command: Ctrl-C reaches the group.
                process_group=0,
            )

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(encoding="utf-8")

    def wait(self) -> int:
        """Waits for the end; returns the exit status."""
        return self.process.wait(timeout=deadline(DEADLINE))

    def result(self) -> Object:
        result: Object = json.loads((self.out / "result.json").read_text(encoding="utf-8"))
        return result

    def wait_for_output(self, text: str) -> None:
        wait_until(lambda: text in self.stdout, timeout=DEADLINE, what=f"tpujob says {text!r}")

    def told(self, what: str, host: int = 0, attempt: int = 1) -> Any:
        """What the worker has told; waits until it does."""
        file = self.directory / f"told.{what}.{attempt}.{host}.json"
        wait_until(file.exists, timeout=DEADLINE, what=f"host {host} tells {what!r} in attempt {attempt}")
        return json.loads(file.read_text(encoding="utf-8"))

    def has_told(self, what: str, host: int = 0, attempt: int = 1) -> bool:
        return (self.directory / f"told.{what}.{attempt}.{host}.json").exists()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """What a terminal does on Ctrl-C: the signal goes to the whole process group."""
        os.killpg(self.process.pid, number)

    def surviving_processes(self) -> list[int]:
        """The pids of all processes that run a script from this directory."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def wait_until_nothing_survives(self) -> None:
        wait_until(lambda: not self.surviving_processes(), timeout=DEADLINE, what="the workers have ended")

    def reap(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.surviving_processes():
            os.kill(pid, signal.SIGKILL)

    def _is_ours(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        # A zombie has no command line.
        return f"{self.directory}/".encode() in command


class Runs:
    """Starts runs below one directory and remembers them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Run] = []

    def start(
        self,
        script: str,
        changes: Mapping[str, Any] | None = None,
        *,
        hosts: int = 1,
        name: str = "job",
        arguments: list[str] | None = None,
        environ: Mapping[str, str] | None = None,
        is_real: bool = False,
    ) -> Run:
        """`script` is what every worker runs; for `changes` see `job_body`. The directory of `name` may exist."""
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        worker = directory / "worker.py"
        worker.write_text(_PRELUDE + script, encoding="utf-8")
        body = job_body(
            {
                "slice.acceleratorType": _SLICES[hosts],
                "trainer.entrypoint": ...,
                "trainer.command": ["python", str(worker)],
                **(changes or {}),
            }
        )
        return self.start_job(directory, body, arguments, environ, is_real)

    def start_job(
        self,
        directory: Path,
        body: Object,
        arguments: list[str] | None = None,
        environ: Mapping[str, str] | None = None,
        is_real: bool = False,
    ) -> Run:
        """`tpujob run` on `body` in the existing `directory`."""
        (directory / "job.json").write_text(json.dumps(body), encoding="utf-8")  # JSON is YAML
        run = Run(directory, arguments or ["--output-dir", "out"], environ or {}, is_real)
        self._started.append(run)
        return run

    def reap(self) -> None:
        for run in self._started:
            run.reap()
