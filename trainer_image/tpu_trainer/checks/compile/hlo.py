"""Reads a program as libtpu has scheduled it for one core: the order of its instructions, their tiles and their memory.

In a type such as f32[10,512]{1,0:T(8,128)S(1)}, 1,0 are the dimensions from minor to major, T(8,128) is the tile to
whose multiples the two minor ones are filled up, and S(1) is a memory on the core; without S it is HBM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.+)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_BITS = re.compile(r"\d+")

# They name or order what is there.
_FREE = {
    "after-all",
    "bitcast",
    "constant",
    "copy-done",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "slice-done",
    "tuple",
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Array:
    """One array of a type. logical: its bytes; padded: those that it takes; hbm: whether it takes them there."""

    logical: int
    padded: int
    hbm: bool
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    line: str


@dataclass(frozen=True)
class Collective:
    """kind: its name in XLA. bytes: what each replica brings. after: the part of the program's matrix products that
    come before it in the schedule, 0..1."""

    kind: str
    bytes: int
    after: float


@dataclass(frozen=True)
class Scheduled:
    """collectives: in their order. traffic: bytes of HBM that the instructions read and write. parameters: the
    program's arguments. products: instructions that multiply matrices. order: "matmul" and "sum" (a collective), as a
    core executes them."""

    collectives: list[Collective]
    traffic: int
    parameters: list[Array]
    products: int
    order: list[str] = field(default_factory=list)


def read(text: str) -> Scheduled:
    """What the scheduled module does, from its text."""
    computations = dict(_computations(text))
    entry = computations.pop("")
    contents = {name: {one.opcode for one in body} for name, body in computations.items()}
    multiplying = {name for name, opcodes in contents.items() if opcodes & {"convolution", "dot"}}
    gathering = {
        name: next(one for one in computations[name] if _collective(one.opcode))
        for name, opcodes in contents.items()
        if any(map(_collective, opcodes))
    }
    by_name = {one.name: one for one in entry}
    found: list[tuple[str, int, int]] = []
    order: list[str] = []
    products = 0
    for one in entry:
        called = set(_NAME.findall(one.line.partition(" calls=")[2].split(",")[0]))
        inside = next((gathering[name] for name in called if name in gathering), None)
        if (kind := _collective(one.opcode)) is not None:
            size = sum(array.logical for name in one.operands for array in by_name[name].arrays)
        elif inside is not None and not one.opcode.endswith(("-done", "-update")):
            kind, size = _collective(inside.opcode), sum(array.logical for array in inside.arrays)
        if kind is not None:
            found.append((kind, size, products))
            order.append("sum")
        if one.opcode in ("convolution", "dot") or called & multiplying:
            products += 1
            order.append("matmul")
    collectives = [Collective(kind, size, before / max(1, products)) for kind, size, before in found]
    traffic = sum(_traffic(one, by_name) for one in entry)
    numbered = sorted(
        (int(one.line.partition("parameter(")[2].partition(")")[0]), one.arrays)
        for one in entry
        if one.opcode == "parameter"
    )
    return Scheduled(collectives, traffic, [array for _, arrays in numbered for array in arrays[:1]], products, order)


def _computations(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """By name; the entry's name is empty."""
    starts = [*_COMPUTATION.finditer(text)]
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        body = text[start.end() : None if following is None else following.start()]
        parsed = [_instruction(found[1], found[2]) for line in body.splitlines() if (found := _INSTRUCTION.match(line))]
        yield "" if start[1] else start[2], parsed


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    kind, call = rest[:end], rest[end:].lstrip()
    opcode, _, after = call.partition("(")
    operands = after[: _closing("(" + after) - 2]
    return Instruction(name, opcode, tuple(map(_array, _ARRAY.finditer(kind))), tuple(_NAME.findall(operands)), call)


def _closing(text: str) -> int:
    """Just behind the bracket that closes the first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place + 1
    return len(text)


def _array(found: re.Match[str]) -> Array:
    kind, sizes, layout = found[1], found[2], found[3] or ""
    shape = tuple(int(size) for size in sizes.split(",") if size)
    bits = int(_BITS.search(kind)[0]) if _BITS.search(kind) else 8  # type: ignore[index]
    space = _SPACE.search(layout)
    order = [int(place) for place in layout.partition(":")[0].split(",") if place]
    # From major to minor, as in memory.
    laid_out = [shape[place] for place in reversed(order)] if len(order) == len(shape) else list(shape)
    if tile := _TILE.search(layout):
        steps = [int(step) for step in tile[1].split(",") if step.isdecimal()]
        for back, step in enumerate(reversed(steps), start=1):
            if back <= len(laid_out):
                laid_out[-back] = -(-laid_out[-back] // step) * step
    sizes_in_bits = (math.prod(shape) * bits, math.prod(laid_out) * bits)
    return Array(sizes_in_bits[0] // 8, sizes_in_bits[1] // 8, space is None or space[1] == "0", shape)


def _collective(opcode: str) -> str | None:
    bare = opcode.removesuffix("-start")
    return bare if bare in COLLECTIVES else None


def _traffic(one: Instruction, by_name: Mapping[str, Instruction]) -> int:
    if one.opcode in _FREE or one.opcode.endswith("-done"):
        return 0
    if one.opcode == "slice-start":
        # It reads no more than it writes.
        return one.arrays[1].padded * (1 + one.arrays[1].hbm)
    # Of an asynchronous copy the first array is written; the second is what is read.
    written = one.arrays[:1] if one.opcode == "copy-start" else one.arrays
    read = [array for name in one.operands if name in by_name for array in by_name[name].arrays]
    return sum(array.padded for array in (*written, *read) if array.hbm)
