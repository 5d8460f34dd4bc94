"""Argo CD and Flux, as far as they read a job: the interpreters that they embed, in a program of go/gitops."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster import binaries

Object = dict[str, Any]


class Refused(Exception):
    """The question has no answer; the message says why."""


class GitOpsTools:
    """Answers questions about objects as the tools do."""

    def __init__(self, program: "subprocess.Popen[str]") -> None:
        self._program = program

    def lua(self, script: Path | str, job: Object) -> Any:
        """What the script returns about `obj`, with no library but those that Argo CD opens in production."""
        text = script.read_text() if isinstance(script, Path) else script
        return self._ask({"lua": text, "object": job})

    def kstatus(self, job: Object) -> str:
        return str(self._ask({"object": job}))

    def health(self, checks: Object, job: Object) -> str:
        """What Flux makes of the object with these `healthCheckExprs`."""
        return str(self._ask({"checks": checks, "object": job}))

    def _ask(self, question: Object) -> Any:
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(question) + "\n")
        self._program.stdin.flush()
        answer = json.loads(self._program.stdout.readline())
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["value"]


@contextmanager
def gitops_tools() -> Iterator[GitOpsTools]:
    program = binaries.ensure("gitops")["gitops"]
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        yield GitOpsTools(running)
