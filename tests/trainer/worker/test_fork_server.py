"""A forked process cannot be told from one that the real command starts, and does not outlive the test worker."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.trainer import fork_server
from tests.trainer.gang_processes import DEADLINE, ON_XLAS_CPU, ROOT, Launcher, Process, real_process
from tests.trainer.introspective import ENDS

MODULE = "tests.trainer.introspective"


def environment(tmp_path: Path, packages: tuple[str, ...], end: str) -> dict[str, str]:
    device = ON_XLAS_CPU if packages == fork_server.XLA else {}
    return {**Launcher(tmp_path).base(), **device, "TEST_END": end, "TEST_IMPORTS": " ".join(packages)}


def said_and_code(process: Process) -> tuple[list[str], int]:
    assert process.stdout is not None
    with process.stdout as stdout:
        return stdout.read().splitlines(), process.wait(timeout=DEADLINE)


def test_a_forked_process_is_what_the_real_command_starts(tmp_path: Path) -> None:
    """Asks with the packages of torch_xla, among which all of torch's are."""
    env = environment(tmp_path, fork_server.XLA, "return")
    (real, *real_lines), real_code = said_and_code(real_process(MODULE, env))
    (forked, *lines), code = said_and_code(fork_server.start(fork_server.XLA, MODULE, env, str(ROOT)))
    assert json.loads(forked) == json.loads(real)
    assert lines == real_lines == ["spawned: __mp_main__", "its code: 0", "at exit"]
    assert code == real_code == 0


@pytest.mark.parametrize("end", [end for end in ENDS if end != "return"])
def test_it_ends_like_the_real_command(tmp_path: Path, end: str) -> None:
    env = environment(tmp_path, fork_server.TORCH, end) | {"TEST_IMPORTS": ""}
    real, real_code = said_and_code(real_process(MODULE, env))
    forked, code = said_and_code(fork_server.start(fork_server.TORCH, MODULE, env, str(ROOT)))
    assert code == real_code
    assert [line for line in forked[1:] if not is_place(line)] == [line for line in real[1:] if not is_place(line)]


def is_place(line: str) -> bool:
    """A line of a traceback, which begins in another module."""
    return line.startswith("  ")


def test_imports_are_made_once_and_a_worker_outlives_the_one_that_made_them(tmp_path: Path) -> None:
    env = environment(tmp_path, ("json",), "never")
    first, second = (fork_server.ForkServer(("json",), env, str(ROOT), sys.executable) for _ in range(2))
    assert (first.made_the_imports, second.made_the_imports) == (True, False)
    before = second.fork(MODULE, env)
    first.close()
    after = second.fork(MODULE, {**env, "TEST_END": "exit"})
    assert (said_and_code(after)[1], before.poll()) == (7, None)
    os.killpg(before.pid, signal.SIGKILL)
    assert said_and_code(before)[1] == -signal.SIGKILL
    second.close()


WORKER = """
import signal, sys
from tests.trainer import fork_server
process = fork_server.start(("json",), *{arguments!r})
process.stdout.readline()
print(process.pid, process.stdout.readline(), flush=True)
signal.pause()
"""


def test_nothing_forked_outlives_the_test_worker(tmp_path: Path) -> None:
    env = environment(tmp_path, ("json",), "never")
    code = WORKER.format(arguments=(MODULE, env, str(ROOT)))
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        family = [os.pidfd_open(int(pid)) for pid in worker.stdout.readline().split()]
        worker.kill()
    survivors = [member for member in family if not select.select([member], [], [], DEADLINE)[0]]
    for member in family:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(member, signal.SIGKILL)
        os.close(member)
    assert (len(family), survivors) == (2, [])
