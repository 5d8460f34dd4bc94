"""Keeps what the compiler has said of a program in a folder, so that no program is compiled twice for one slice.

A file's name is a digest of all that the compiler's answer depends on. The file repeats it, with a checksum of the
answer: one that is torn, or that anything else has written, is not read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

_SCHEMA = "compiled/v1"
_MOST_FILES = 200
_SUFFIX = ".json.gz"
_PACKAGES = ("libtpu", "jax", "jaxlib")
# The compiler's flags, and what else it reads.
_PREFIXES = ("LIBTPU_", "XLA_", "TPU_", "JAX_")
# Its name has a number in it that says nothing about the program.
_MODULE = re.compile(r"\Amodule @[\w.]+")


class AnswerCache:
    """Answers of this process, and of earlier ones in `folder`, if there is one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, Any]] = {}

    def ask(
        self, program: Mapping[str, Any], where: Mapping[str, Any], compiler: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Returns the compiler's answer about a program for a slice, or that of an earlier time."""
        key = _key(program, where)
        name = _digest(key)
        answer = self._known.get(name) or self._read(name, key)
        if answer is None:
            answer = compiler()
            # An error of the compiler's own may not come again.
            if "refused" not in answer or answer["fits"] is False:
                self._write(name, key, answer)
        self._known[name] = answer
        return answer

    def _read(self, name: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        if self._folder is None:
            return None
        with suppress(OSError, EOFError, ValueError, TypeError, KeyError, zlib.error):
            kept = json.loads(gzip.decompress((self._folder / f"{name}{_SUFFIX}").read_bytes()))
            if kept["key"] == key and kept["checksum"] == _digest(kept["answer"]):
                answer: dict[str, Any] = kept["answer"]
                return {**answer, "kept": True}
        return None

    def _write(self, name: str, key: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        document = {"key": key, "checksum": _digest(answer), "answer": answer}
        unfinished = self._folder / f"{name}.{os.getpid()}"
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.write_bytes(gzip.compress(json.dumps(document).encode(), compresslevel=3))
            unfinished.replace(self._folder / f"{name}{_SUFFIX}")
            files = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime)
            for old in files[:-_MOST_FILES]:
                old.unlink()


def _key(program: Mapping[str, Any], where: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "program": _digest(_MODULE.sub("", program["stablehlo"])),
        "inPlace": [list(pair) for pair in program["in_place"]],
        "slice": [where["generation"], where["topology"], where["replicas"]],
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
