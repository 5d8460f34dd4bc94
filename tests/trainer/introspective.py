"""A module that says what kind of process runs it, and ends as TEST_END says; for `test_fork_server`."""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ENDS = ("return", "exit", "raise", "exit in a thread's lifetime", "killed", "told", "os._exit")


def about_this_process() -> dict[str, object]:
    """What must not depend on how the process was started."""
    main = sys.modules["__main__"]
    for package in os.environ["TEST_IMPORTS"].split():
        importlib.import_module(package)
    return {
        "argv": sys.argv,
        "main": [
            __name__,
            main.__dict__["__spec__"].name,
            main.__dict__["__file__"],
            main.about_this_process.__module__,
        ],
        # torch.distributed adds an empty directory of a random name, which forks share.
        "path": [entry for entry in sys.path if Path(entry).parent != Path(tempfile.gettempdir())],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "signals": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "threads": len(os.listdir("/proc/self/task")),
        "parent": str(multiprocessing.parent_process()),
        "stdout": [sys.stdout.encoding, sys.stdout.line_buffering],
        "files": sorted(_open_files()),
        "this project's modules": sorted(name for name in sys.modules if name.startswith("tpu_trainer")),
    }


def _open_files() -> Iterator[str]:
    """Their kinds, standard input left out: a test worker's own is not worth an equal."""
    for name in os.listdir("/proc/self/fd"):
        # The listing itself is gone.
        with suppress(FileNotFoundError):
            if name != "0":
                yield os.readlink(f"/proc/self/fd/{name}").partition(":")[0]


def _in_another_process() -> None:
    print("spawned:", __name__, flush=True)


def _end(how: str) -> None:
    if how == "exit":
        sys.exit(7)
    if how == "raise":
        raise ValueError("raised to the top")
    if how == "exit in a thread's lifetime":
        threading.Thread(target=lambda: (threading.main_thread().join(), print("the thread has ended"))).start()
        sys.exit("last words")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "told":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "os._exit":
        os._exit(69)
    if how == "never":
        print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
        signal.pause()


if __name__ == "__main__":
    atexit.register(print, "at exit")
    print(json.dumps(about_this_process()), flush=True)
    if os.environ["TEST_END"] == "return":
        child = multiprocessing.get_context("spawn").Process(target=_in_another_process)
        child.start()
        child.join()
        print("its code:", child.exitcode)
    _end(os.environ["TEST_END"])
