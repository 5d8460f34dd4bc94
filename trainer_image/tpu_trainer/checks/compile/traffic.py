"""How many bytes of HBM an instruction of a scheduled program reads and writes.

A lookup reads the rows that it returns, and an update in place writes the rows that are new, however large the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

_READS_ROWS = ("gather", "dynamic-slice")
_NEW_ROWS = {"scatter": -1, "dynamic-update-slice": 1}
"""The operand that holds the new rows; the first one is the table."""


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


def traffic_of(step: Instruction, by_name: Mapping[str, Instruction], inside: Sequence[Instruction]) -> int:
    """Returns the bytes. by_name: the computation that `step` is part of; inside: the instructions of the computation
    that a fusion calls, or just `step`."""
    if step.opcode in _FREE or step.opcode.endswith("-done"):
        return 0
    if step.opcode == "slice-start":
        # It reads no more than it writes.
        return step.arrays[1].padded * (1 + step.arrays[1].hbm)
    fused = inside[0] is not step
    values = {value.name: value for value in inside} if fused else by_name
    # An asynchronous copy writes its first array and reads its second.
    written = step.arrays[:1] if step.opcode == "copy-start" else step.arrays
    moved = sum(_written(array, inside, values, fused=fused) for array in written if array.hbm)
    for number, name in enumerate(step.operands):
        if name in by_name:
            rows = _rows_read(_parameter(number, inside) if fused else name, inside, values)
            moved += sum(array.padded if rows is None else rows for array in by_name[name].arrays if array.hbm)
    return moved


def _parameter(number: int, inside: Sequence[Instruction]) -> str:
    return next((value.name for value in inside if value.line.startswith(f"parameter({number})")), "")


def _rows_read(name: str, inside: Sequence[Instruction], values: Mapping[str, Instruction]) -> int | None:
    """Returns the bytes of the rows that are read of a table; None if the value is not only a table."""
    uses = [use for use in inside if name in use.operands]
    if not uses or any(use.operands.index(name) or use.opcode not in (*_READS_ROWS, *_NEW_ROWS) for use in uses):
        return None
    return sum(_size(use) if use.opcode in _READS_ROWS else _new_rows(use, values) for use in uses)


def _written(array: Array, inside: Sequence[Instruction], values: Mapping[str, Instruction], *, fused: bool) -> int:
    for update in inside:
        # A table that a fusion makes itself is written whole.
        if (
            update.opcode in _NEW_ROWS
            and update.arrays[0].shape == array.shape
            and (not fused or values[update.operands[0]].opcode == "parameter")
        ):
            return _new_rows(update, values)
    return array.padded


def _new_rows(update: Instruction, values: Mapping[str, Instruction]) -> int:
    return _size(values[update.operands[_NEW_ROWS[update.opcode]]])


def _size(value: Instruction) -> int:
    return sum(array.padded for array in value.arrays)
