"""Archives that nobody vouches for: what is unpacked, and what is refused without a trace outside the directory."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_trainer.worker import archive
from tpu_trainer.worker.archive import BadArchiveError, unpack


def packed(*members: tuple[tarfile.TarInfo, bytes], kind: int = tarfile.PAX_FORMAT) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=kind) as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(plain.getvalue(), 1, mtime=0)


def file(name: str, content: bytes = b"x", **attributes: object) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    return member, content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "outside" / "code"
    place.mkdir(parents=True)
    return place


def below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_come_out_as_they_went_in(place: Path, kind: int) -> None:
    long = "/".join(["package"] * 20) + "/module.py"
    content = {"train.py": b"print()\n", "empty": b"", "ein Name mit Ä.txt": b"a" * 5000}
    content |= {} if kind == tarfile.USTAR_FORMAT else {long: b"deep"}
    folder = special("./", tarfile.DIRTYPE)

    count = unpack(packed(folder, *(file(*one) for one in content.items()), kind=kind), place)

    assert count == len(content)
    assert {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()} == content


@pytest.mark.parametrize(("mode", "expected"), [(0o644, 0o644), (0o755, 0o755), (0o6777, 0o755), (0, 0o644)])
def test_of_its_rights_a_file_keeps_that_it_can_be_run(place: Path, mode: int, expected: int) -> None:
    unpack(packed(file("script", mode=mode)), place)
    assert (place / "script").stat().st_mode & 0o7777 == expected


HOSTILE = {
    "an absolute path": [file("/tmp/escaped")],
    "a path that leads up": [file("../escaped")],
    "a path that leads up later": [file("a/../../escaped")],
    "no name": [file("./")],
    "a symbolic link out": [special("out", tarfile.SYMTYPE, "..")],
    "a file through a link": [special("out", tarfile.SYMTYPE, ".."), file("out/escaped")],
    "a link that stays inside": [file("a"), special("b", tarfile.SYMTYPE, "a")],
    "a hard link": [special("passwd", tarfile.LNKTYPE, "/etc/passwd")],
    "a device": [special("zero", tarfile.CHRTYPE)],
    "a block device": [special("disk", tarfile.BLKTYPE)],
    "a named pipe": [special("pipe", tarfile.FIFOTYPE)],
    "an unknown kind": [special("odd", b"Z")],
    "a file twice": [file("a"), file("a")],
    "a file in a file": [file("a"), file("a/b")],
    "a directory that was a file": [file("a"), special("a", tarfile.DIRTYPE)],
    "a control character": [file("a\x1b[2Jb")],
    "a backslash": [file("..\\escaped")],
    "a name too long for a disk": [file("a" * 300)],
    "nothing": [],
    "a directory alone": [special("a", tarfile.DIRTYPE)],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_archive_is_refused_and_touches_nothing_outside(
    place: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    with pytest.raises(BadArchiveError):
        unpack(packed(*members), place)
    assert [name for name in below(place.parent) if not name.startswith("code")] == []
    assert not any(path.is_symlink() for path in place.rglob("*"))


def sparse(size: int) -> bytes:
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(size)}
    return packed(file("big", b"1\n0\n0\n" + bytes(506), pax_headers=headers | {"GNU.sparse.name": "big"}))


def chain_of_headers(count: int) -> bytes:
    """Each is read by a call within the call for the one before."""
    plain = io.BytesIO()
    header = tarfile.TarInfo.create_pax_global_header({"comment": "x"})
    plain.write(header * count)
    return gzip.compress(plain.getvalue(), 1)


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "a text": lambda whole: b"<html>not found</html>",
    "a zip": lambda whole: b"PK\x03\x04" + whole[4:],
    "compressed, but no tar": lambda whole: gzip.compress(b"hello" * 500),
    "zeros": lambda whole: gzip.compress(bytes(20_480)),
    "cut off": lambda whole: whole[: len(whole) // 2],
    "something behind it": lambda whole: whole + b"more",
    "a second tar behind it": lambda whole: gzip.compress(gzip.decompress(whole) * 2),
    "damage between two files": lambda whole: gzip.compress(_without_second_header(gzip.decompress(whole))),
    "a tar that is cut off": lambda whole: gzip.compress(gzip.decompress(whole)[:700]),
    "a sparse file of a terabyte": lambda whole: sparse(2**40),
    "a thousand headers": lambda whole: chain_of_headers(1000),
}


def _without_second_header(plain: bytes) -> bytes:
    return plain[:1024] + b"\xff" * 512 + plain[1536:]


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED.keys())
def test_what_is_no_archive_is_said_to_be_none(place: Path, damage: Callable[[bytes], bytes]) -> None:
    whole = packed(file("a.py", b"a" * 400), file("b.py", b"b" * 400))
    with pytest.raises(BadArchiveError):
        unpack(damage(whole), place)


def test_a_small_archive_that_becomes_large_is_stopped_on_the_way(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LARGEST_CODE", 1000)
    monkeypatch.setattr(archive, "_BESIDE_FILES", 2048)
    bomb = packed(file("zeros", bytes(50_000_000)))
    with pytest.raises(BadArchiveError, match="take more than 1000 bytes"):
        unpack(bomb, place)
    assert below(place) == []


def test_there_is_a_most_number_of_entries(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_CODE_FILES", 3)
    unpack(packed(*(file(str(number)) for number in range(3))), place)
    with pytest.raises(BadArchiveError, match="more than 3 entries"):
        unpack(packed(*(special(f"d{number}", tarfile.DIRTYPE) for number in range(4))), place)


def test_a_changed_bit_never_does_worse_than_a_refusal(tmp_path: Path) -> None:
    """In the tar itself: gzip's checksum would find it."""
    plain = gzip.decompress(packed(file("a/b.py", b"b" * 600), file("c.py", pax_headers={"comment": "c"})))
    chance = random.Random(3)
    for number in range(300):
        changed = bytearray(plain)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(3072)] = chance.randrange(256)
        place = tmp_path / str(number)
        place.mkdir()
        with contextlib.suppress(BadArchiveError):
            unpack(gzip.compress(bytes(changed), 1), place)
        inside = [Path(root) for root, _, _ in os.walk(place, followlinks=False)]
        assert all(path.is_relative_to(place) and not path.is_symlink() for path in inside)
    assert len(list(tmp_path.iterdir())) == 300
