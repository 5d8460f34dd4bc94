"""What the compiler has said of a program is kept, and found for that program only."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpu_trainer.checks.compile import cache

PROGRAM: dict[str, Any] = {"stablehlo": "module @IrToHlo.7 {\n  return\n}", "in_place": [(0, 0)]}
WHERE = {"generation": "v5e", "topology": "4x4", "replicas": 16, "hosts": 4}
FITS = {"seconds": 1.5, "temporaries": 5, "hlo": "HloModule a"}
TOO_LARGE = {"refused": "RESOURCE_EXHAUSTED: ...", "needed": 9, "fits": False}
BROKEN = {"refused": "INTERNAL: ...", "needed": None, "fits": None}


class Compiler:
    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self) -> dict[str, Any]:
        self.asked += 1
        return self.answer


def ask(folder: Path | None, compiler: Compiler, program: Any = None, where: Any = WHERE) -> dict[str, Any]:
    """Asks as a process does that has just started."""
    return cache.AnswerCache(folder).ask(program or PROGRAM, where, compiler)


@pytest.mark.parametrize("answer", [FITS, TOO_LARGE])
def test_a_program_is_compiled_once(answer: dict[str, Any], tmp_path: Path) -> None:
    compiler, folder = Compiler(answer), tmp_path / "a" / "b"
    assert ask(folder, compiler) == answer
    # The number in the module's name counts the modules of a process.
    again = ask(folder, compiler, PROGRAM | {"stablehlo": PROGRAM["stablehlo"].replace("IrToHlo.7", "IrToHlo.9")})
    assert again == answer | {"kept": True}
    assert compiler.asked == 1


def test_one_process_asks_once_without_a_folder() -> None:
    compiler, answers = Compiler(FITS), cache.AnswerCache()
    assert [answers.ask(PROGRAM, WHERE, compiler) for _ in range(2)] == [FITS, FITS]
    assert compiler.asked == 1


def test_an_error_of_the_compilers_own_is_not_kept(tmp_path: Path) -> None:
    compiler = Compiler(BROKEN)
    assert [ask(tmp_path, compiler) for _ in range(2)] == [BROKEN, BROKEN]
    assert compiler.asked == 2


OTHER_PROGRAMS = {
    "body": PROGRAM | {"stablehlo": "module @IrToHlo.7 {\n  return 1\n}"},
    "aliases": PROGRAM | {"in_place": []},
}
OTHER_SLICES = {"generation": "v6e", "topology": "2x8", "replicas": 8}


@pytest.mark.parametrize("what", [*OTHER_PROGRAMS, *OTHER_SLICES, "LIBTPU_INIT_ARGS", "XLA_FLAGS", "libtpu"])
def test_whatever_the_answer_depends_on_makes_it_another(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(FITS)
    ask(tmp_path, compiler)
    if what.isupper():
        monkeypatch.setenv(what, "--xla_tpu_scoped_vmem_limit_kib=1")
    if what == "libtpu":
        monkeypatch.setattr(cache.metadata, "version", lambda _: "9.9")
    where = {name: OTHER_SLICES[name] if name == what else value for name, value in WHERE.items()}
    assert "kept" not in ask(tmp_path, compiler, OTHER_PROGRAMS.get(what), where)
    assert compiler.asked == 2


def _edited(data: bytes) -> bytes:
    document = json.loads(gzip.decompress(data))
    document["answer"]["temporaries"] = 1
    return gzip.compress(json.dumps(document).encode())


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda data: data[: len(data) // 2],
    "one bit": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "empty": lambda _: b"",
    "no archive": lambda _: b"{}",
    "another document": lambda _: gzip.compress(b"[1]"),
    "another program's": lambda data: gzip.compress(gzip.decompress(data).replace(b"4x4", b"2x8")),
    "edited": _edited,
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_file_that_is_not_whole_or_not_ours_is_not_read(how: str, tmp_path: Path) -> None:
    compiler = Compiler(FITS)
    ask(tmp_path, compiler)
    (file,) = tmp_path.iterdir()
    file.write_bytes(SPOILT[how](file.read_bytes()))
    assert ask(tmp_path, compiler) == FITS
    # It is written again.
    assert ask(tmp_path, compiler) == FITS | {"kept": True}
    assert compiler.asked == 2


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiler = Compiler(FITS)
    assert ask(tmp_path / "file", compiler) == FITS


def test_the_oldest_answers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_FILES", 2)
    for size in range(4):
        ask(tmp_path, Compiler(FITS), where=WHERE | {"replicas": size})
    assert len([*tmp_path.iterdir()]) == 2
    assert "kept" in ask(tmp_path, Compiler(FITS), where=WHERE | {"replicas": 3})
