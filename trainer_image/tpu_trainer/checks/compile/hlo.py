"""Reads a program as libtpu has scheduled it for one core: the order of its instructions, their tiles and their memory.

In a type such as f32[10,512]{1,0:T(8,128)S(1)}, 1,0 are the dimensions from minor to major, T(8,128) is the tile to
whose multiples the two minor ones are filled up, and S(1) is a memory on the core; without S it is HBM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tpu_trainer.checks.compile.traffic import Array, Instruction, traffic_of

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.+)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_BITS = re.compile(r"\d+")
_CONSTANT = re.compile(r"constant\((\d+)\)")

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """A collective. kind: its name in XLA; bytes: each replica's input; after: the share of the program's matrix
    products that come before it in the schedule, 0..1. waits: whether nothing runs beside it, because the schedule has
    it as one instruction and not as a start and an end; traffic: the bytes of HBM that it reads and writes itself."""

    kind: str
    bytes: int
    after: float
    waits: bool
    traffic: int


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
    found: list[tuple[str, int, int, bool, int]] = []
    order: list[str] = []
    products = traffic = 0
    for step, by_name, times in _in_order(entry, computations):
        called = _called(step, "calls")
        moved = traffic_of(step, by_name, computations.get(called, [step]))
        traffic += times * moved
        inside = gathering.get(called)
        if (kind := _collective(step.opcode)) is not None:
            size = sum(array.logical for name in step.operands for array in by_name[name].arrays)
        elif inside is not None and not step.opcode.endswith(("-done", "-update")):
            kind, size = _collective(inside.opcode), sum(array.logical for array in inside.arrays)
        if kind is not None:
            waits = step.opcode == kind
            found += [(kind, size, products, waits, moved if waits else 0)] * times
            order += ["sum"] * times
        if step.opcode in ("convolution", "dot") or called in multiplying:
            products += times
            order += ["matmul"] * times
    collectives = [
        Collective(kind, size, before / max(1, products), waits, moved) for kind, size, before, waits, moved in found
    ]
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


def _in_order(
    body: list[Instruction], computations: Mapping[str, list[Instruction]], times: int = 1
) -> Iterator[tuple[Instruction, Mapping[str, Instruction], int]]:
    """Yields the instructions as they are executed, with all of their computation by name, and how often each is: those
    of a loop once for each trip."""
    by_name = {step.name: step for step in body}
    for step in body:
        if step.opcode == "while":
            trips = _trips(computations[_called(step, "condition")])
            yield from _in_order(computations[_called(step, "body")], computations, times * trips)
        else:
            yield step, by_name, times


def _called(step: Instruction, role: str) -> str:
    """Returns the name of the computation that an instruction calls in a role; "" if it calls none."""
    found = re.search(rf"\b{role}=%([\w.\-]+)", step.line)
    return found[1] if found else ""


def _trips(condition: list[Instruction]) -> int:
    """Returns the trips of a loop that counts from 0 to a constant; 1 if its condition is another."""
    constants = {step.name: int(match[1]) for step in condition if (match := _CONSTANT.match(step.line))}
    compared = [
        constants[name]
        for step in condition
        if step.opcode == "compare" and "direction=LT" in step.line
        for name in step.operands[1:]
        if name in constants
    ]
    return max(1, *compared) if compared else 1
