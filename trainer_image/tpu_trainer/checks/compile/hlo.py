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

# These instructions only name or order values.
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
    """An array in an instruction's type. logical: its bytes; padded: with padding; hbm: whether it is in HBM."""

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
    """A collective. kind: its name in XLA; bytes: each replica's input; after: the share of the program's matrix
    products that come before it in the schedule, 0..1."""

    kind: str
    bytes: int
    after: float


@dataclass(frozen=True)
class Scheduled:
    """A program as a core executes it.

    traffic: bytes of HBM that the instructions read and write. parameters: the program's arguments. order: "matmul" and
    "sum" (a collective), as they are executed.
    """

    collectives: list[Collective]
    traffic: int
    parameters: list[Array]
    order: list[str] = field(default_factory=list)


def read(text: str) -> Scheduled:
    """Reads what the scheduled module does from its text."""
    computations = dict(_computations(text))
    entry = computations.pop("")
    contents = {name: {step.opcode for step in body} for name, body in computations.items()}
    multiplying = {name for name, opcodes in contents.items() if opcodes & {"convolution", "dot"}}
    gathering = {
        name: next(step for step in computations[name] if _collective(step.opcode))
        for name, opcodes in contents.items()
        if any(map(_collective, opcodes))
    }
    by_name = {step.name: step for step in entry}
    exchanges: list[tuple[str, int, int]] = []
    order: list[str] = []
    products = 0
    for step in entry:
        called = set(_NAME.findall(step.line.partition(" calls=")[2].split(",")[0]))
        inside = next((gathering[name] for name in called if name in gathering), None)
        if (kind := _collective(step.opcode)) is not None:
            size = sum(array.logical for name in step.operands for array in by_name[name].arrays)
        elif inside is not None and not step.opcode.endswith(("-done", "-update")):
            kind, size = _collective(inside.opcode), sum(array.logical for array in inside.arrays)
        if kind is not None:
            exchanges.append((kind, size, products))
            order.append("sum")
        if step.opcode in ("convolution", "dot") or called & multiplying:
            products += 1
            order.append("matmul")
    collectives = [Collective(kind, size, before / max(1, products)) for kind, size, before in exchanges]
    traffic = sum(_traffic(step, by_name) for step in entry)
    numbered = sorted(
        (int(step.line.partition("parameter(")[2].partition(")")[0]), step.arrays)
        for step in entry
        if step.opcode == "parameter"
    )
    return Scheduled(collectives, traffic, [array for _, arrays in numbered for array in arrays[:1]], order)


def _computations(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Yields each computation's name and instructions; the entry's name is empty."""
    starts = [*_COMPUTATION.finditer(text)]
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        body = text[start.end() : None if following is None else following.start()]
        parsed = [_instruction(match[1], match[2]) for line in body.splitlines() if (match := _INSTRUCTION.match(line))]
        yield "" if start[1] else start[2], parsed


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    kind, call = rest[:end], rest[end:].lstrip()
    opcode, _, after = call.partition("(")
    operands = after[: _closing("(" + after) - 2]
    return Instruction(name, opcode, tuple(map(_array, _ARRAY.finditer(kind))), tuple(_NAME.findall(operands)), call)


def _closing(text: str) -> int:
    """Returns the place just behind the bracket that closes the first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place + 1
    return len(text)


def _array(match: re.Match[str]) -> Array:
    kind, sizes, layout = match[1], match[2], match[3] or ""
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


def _traffic(step: Instruction, by_name: Mapping[str, Instruction]) -> int:
    if step.opcode in _FREE or step.opcode.endswith("-done"):
        return 0
    if step.opcode == "slice-start":
        # It reads no more than it writes.
        return step.arrays[1].padded * (1 + step.arrays[1].hbm)
    # An asynchronous copy writes its first array and reads its second.
    written = step.arrays[:1] if step.opcode == "copy-start" else step.arrays
    read = [array for name in step.operands if name in by_name for array in by_name[name].arrays]
    return sum(array.padded for array in (*written, *read) if array.hbm)
