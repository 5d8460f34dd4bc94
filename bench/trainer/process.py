"""One timed run with a process per host: read line by line, and always reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from bench.trainer.reports import NotComparable

ROOT = Path(__file__).parents[2]
LIMIT = 900.0
"""Seconds after which a run is given up."""


class Line(NamedTuple):
    """at: the monotonic seconds at which it came. busy: seconds of a processor that the main thread has used by then,
    by the kernel's count, which does not depend on what else the machine does."""

    at: float
    busy: float
    text: str


def watch(module: str, arguments: Sequence[str], *hosts: Mapping[str, str]) -> list[Line]:
    """Returns the lines that `python -m module arguments` prints.

    `hosts`: the additional environment of each process; the lines come from the first.

    Raises NotComparable with the end of its output if the first one fails or still runs after LIMIT.
    """
    with tempfile.TemporaryFile("w+") as errors, contextlib.ExitStack() as started:
        outputs: list[IO[str] | int] = [subprocess.PIPE, *[errors] * (len(hosts) - 1)]
        first, *_ = [
            started.enter_context(_process([module, *arguments], host, output, errors))
            for host, output in zip(hosts, outputs, strict=True)
        ]
        assert first.stdout is not None
        lines = [Line(time.monotonic(), _busy(first.pid), line) for line in first.stdout]
        if (code := first.wait()) != 0:
            errors.seek(0)
            said = "".join(line.text for line in lines) + errors.read()
            raise NotComparable(f"{module} {' '.join(arguments)} ended with {code}:\n{said[-2000:]}")
    return lines


@contextlib.contextmanager
def _process(
    command: Sequence[str], host: Mapping[str, str], output: IO[str] | int, errors: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TPUJOB_", "PJRT_", "XLA_"))}
    path = f"{ROOT / 'trainer_image'}{os.pathsep}{ROOT}"
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", *command],
        env={**kept, "PYTHONPATH": path, "PJRT_DEVICE": "CPU", **host},
        cwd=ROOT,
        stdout=output,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(LIMIT, _kill, [process.pid])
    limit.start()
    try:
        yield process
        # The first has succeeded and its numbers count; the others end with it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
    finally:
        limit.cancel()
        if process.poll() is None:
            _kill(process.pid)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _busy(process: int) -> float:
    """Seconds of a processor that the main thread has used; 0 once the process has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9
    return 0.0


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
