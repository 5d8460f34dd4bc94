"""Where logs are printed: one worker's as it is, several workers' line by line, each line with its place.

Used by `tpujob logs`.
"""

import codecs
from typing import IO, Protocol

import click

from tpu_training_operator.api.text import plain
from tpu_training_operator.cli.program import program_name
from tpu_training_operator.domain.naming import WorkerId

# A line that is longer is printed in parts: other workers' lines may come between them.
LONGEST_LINE = 16 * 1024


class Out(Protocol):
    """Where bytes go: a pipe or a file as it is, a terminal through `Terminal`."""

    def write(self, text: bytes, /) -> object: ...

    def flush(self) -> None: ...


class Terminal:
    """A terminal obeys what it is shown, and a log is a stranger's text: it is shown without control characters."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        # A piece may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, text: bytes, /) -> None:
        self._out.write(plain(self._decoder.decode(text)).encode())

    def flush(self) -> None:
        self._out.flush()


class OneLog:
    """The bytes as they come; however long a line is, no more than the next piece is held."""

    def __init__(self, out: Out) -> None:
        self._out = out
        self._ends_a_line = True

    def write(self, worker: WorkerId, text: bytes) -> None:
        self._ends_a_line = text.endswith(b"\n")
        self._out.write(text)
        self._out.flush()

    def end(self, worker: WorkerId) -> None:
        if not self._ends_a_line:
            self.write(worker, b"\n")

    def say(self, text: str) -> None:
        say(text)


class SeveralLogs:
    """Whole lines, each after `[slice/host]`."""

    def __init__(self, out: Out) -> None:
        self._out = out
        self._held: dict[WorkerId, bytes] = {}

    def write(self, worker: WorkerId, text: bytes) -> None:
        *lines, rest = (self._held.pop(worker, b"") + text).split(b"\n")
        while len(rest) >= LONGEST_LINE:
            lines.append(rest[:LONGEST_LINE])
            rest = rest[LONGEST_LINE:]
        if rest:
            self._held[worker] = rest
        if lines:
            place = f"[{worker.slice}/{worker.host}] ".encode()
            self._out.write(b"".join(place + line + b"\n" for line in lines))
            self._out.flush()

    def end(self, worker: WorkerId) -> None:
        if worker in self._held:
            self.write(worker, b"\n")

    def say(self, text: str) -> None:
        say(text)


def say(text: str) -> None:
    click.echo(f"{program_name()}: {text}", err=True)
