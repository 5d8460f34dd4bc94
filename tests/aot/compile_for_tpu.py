"""Compiles steps in one process, which spares them the start of a Python with jax and libtpu each.

`python -m tests.aot.compile_for_tpu` reads requests, one a line: an effort from -1 (least) to 0 (the compiler's own),
and a directory that `traced_step` has written. It writes into each what
`tpu_trainer.checks.compile.compiling` would, and answers with a line: the traceback's last, or nothing.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.trainer.gang_processes import ROOT
from tpu_trainer.checks.compile import compiling


class Compiler:
    """The process; slices of all generations can be compiled for in turn."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def compile(self, directory: Path, *, quickly: bool = False) -> dict[str, Any]:
        """`quickly`: the compiler makes no effort to save a program's time and memory, which takes it a fraction of its
        own. The program needs more memory, and fits or is refused like any other."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(-1.0 if quickly else 0.0, directory, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer == "\n", answer or "the compiler has ended"
        found: dict[str, Any] = json.loads((directory / "compiled.json").read_bytes())
        return found


@contextmanager
def compiler(env: Mapping[str, str]) -> Iterator[Compiler]:
    command = [sys.executable, "-m", "tests.aot.compile_for_tpu"]
    with subprocess.Popen(
        command, env=env, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield Compiler(process)
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        effort, _, directory = line.strip().partition(" ")
        try:
            with mock.patch.object(
                compiling, "compile_program", functools.partial(_compiled, compiling.compile_program, float(effort))
            ):
                compiling.main(Path(directory))
        except Exception as error:
            print(f"{type(error).__name__}: {str(error).splitlines()[:1]}", file=answers, flush=True)
        else:
            print(file=answers, flush=True)


def _compiled(compiled: Callable[..., Any], effort: float, *program: Any) -> Any:
    # Only now: `compiling` has set the variables that are read on import.
    import jax

    jax.config.update("jax_exec_time_optimization_effort", effort)
    jax.config.update("jax_memory_fitting_effort", effort)
    return compiled(*program)


if __name__ == "__main__":
    main()
