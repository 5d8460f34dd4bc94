"""Compiles steps for slices of all generations in one process, and with less effort than for users.

`python -m tests.aot.compile_for_tpu` reads requests, one a line of JSON: an effort from -1 (least) to 0 (the
compiler's own), a traced step and a slice. It answers with a line: what `compiling.compile_step` returns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.trainer.gang_processes import ROOT
from tpu_trainer.checks.compile import compiling


class Compiler:
    """The process; slices of all generations can be compiled for in turn."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def compile(self, traced: Mapping[str, Any], where: Mapping[str, Any], *, quickly: bool = False) -> dict[str, Any]:
        """`quickly`: the compiler makes no effort to save a program's time and memory, which takes it a fraction of its
        own. The program needs more memory, and fits or is refused like any other."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([-1.0 if quickly else 0.0, traced, where]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the compiler has ended"
        answer: dict[str, Any] = json.loads(line)
        if "unknown" in answer:
            raise compiling.UnknownSliceError(answer["unknown"])
        return answer


@contextmanager
def compiler(env: Mapping[str, str]) -> Iterator[Compiler]:
    command = [sys.executable, "-m", "tests.aot.compile_for_tpu"]
    with subprocess.Popen(
        command, env=env, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield Compiler(process)
        process.stdin.close()


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    # jax reads it on import.
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    for line in sys.stdin:
        effort, traced, where = json.loads(line)
        jax.config.update("jax_exec_time_optimization_effort", effort)
        jax.config.update("jax_memory_fitting_effort", effort)
        try:
            answer = compiling.compile_step(traced, where)
        except compiling.UnknownSliceError as error:
            answer = {"unknown": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
