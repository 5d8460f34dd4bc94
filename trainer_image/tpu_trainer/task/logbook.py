"""What a task logs while it trains: means over all replicas, without an extra collective or wait.

The values of a step follow the signals in its exchange, two numbers per name: the weighted sum and the sum of the
weights. All replicas must send the same layout, so they agree on a table of names: in the first two steps, and again
whenever one of them has a new name, which it signals in the exchange itself. A name that is not logged in a step, or
not on this replica, has a weight of 0 there. Names do not share numbers, so a NaN affects only its own name.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.gang.exchange import LoggedRow
from tpu_trainer.gang.gather import checksum

if TYPE_CHECKING:
    from tpu_trainer.gang.backends.base import Backend

MOST_NAMES = 64
"""The most names of a run: a task that logs a new name in every step must not make the exchange grow forever."""

NAME_LENGTH = 128
"""The most characters of a name; more would not fit into a report to the operator."""

AGREEMENT_SECONDS = 300.0
"""How long a replica waits for the others to log the same names before it fails."""

_ROOM = 8
_CACHED = 16


@dataclass(frozen=True)
class Style:
    """How a name is reduced and shown. kind: the reduction over passes, replicas and an epoch's steps. step, epoch:
    whether there is a value for every step, and for every epoch. shown: whether the log's lines show it."""

    kind: Literal["mean", "sum"] = "mean"
    step: bool = True
    epoch: bool = False
    shown: bool = True


@dataclass(frozen=True)
class LoggedCurve:
    """New values of one name, with the steps after which they were taken. They may be NaN or infinite."""

    name: str
    points: tuple[tuple[int, float], ...]
    shown: bool = True


@dataclass
class _StepSums:
    """The sums of a name since the last exchange: numbers of the host, and values that are still on the device."""

    style: Style
    total: float = 0.0
    weight: float = 0.0
    totals: Tensor | None = None
    weights: Tensor | None = None


@dataclass
class _EpochSums:
    """The sums of a name since its epoch began."""

    style: Style
    total: float = 0.0
    weight: float = 0.0


_OPEN = threading.local()
"""Holds, as `book`, the logbook of the replica that this thread runs."""


def log(name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
    """Reports a number of this step to TensorBoard, the report, the job's status and the log.

    Call it in `loss` or in a hook, in all processes alike. The reported value is the mean over all replicas and
    accumulation passes. `value`: a number or a tensor with one element; a tensor stays on its device and delays
    nothing. `weight`: for a mean over unequal parts, such as the number of tokens. Values logged after the backward
    pass count for the next step. Outside of a training, and in an evaluation, the call does nothing.

    Raises:
        UserCodeError: the name or the value cannot be logged.
    """
    if name == "loss":
        raise UserCodeError('log: the name "loss" is the training loss, which is reported anyway; choose another one')
    note(name, value, weight, Style())


def note(name: str, value: Any, weight: Any, style: Style) -> None:
    """Does what `log` does, with a style."""
    if (book := getattr(_OPEN, "book", None)) is not None:
        book.add(name, value, weight, style)


class Logbook:
    """The logged values of one replica. `warn`: called with texts that users should read."""

    def __init__(self, backend: Backend, warn: Callable[[str], None] = lambda text: None) -> None:
        self._backend, self._warn = backend, warn
        self._table: dict[str, Style] = {}
        self._rows = 0
        self._entries: dict[str, _StepSums] = {}
        self._waiting: dict[str, _StepSums] = {}
        self._inside = False
        self._full = False
        self._sent: tuple[list[float], Tensor] | None = None
        self._numbers: dict[float, Tensor] = {}
        self._patterns: set[tuple[str, ...]] = set()
        self._points: dict[tuple[str, bool], list[tuple[int, float]]] = {}
        self._epochs: dict[str, _EpochSums] = {}
        self._boundaries: list[int] = []

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Wraps a step's passes: only values that are logged there belong to an epoch."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def add(self, name: Any, value: Any, weight: Any, style: Style) -> None:
        name = plain_name(name)
        if not self._inside and style.epoch:
            style = Style(style.kind, True, False, style.shown)
        entry = self._entries.setdefault(name, _StepSums(style))
        here, there = _number(name, value)
        factor, factors = _number(name, weight, "weight")
        if there is None and factors is None:
            # A value without weight is left out: infinity times 0 would be NaN.
            entry.total += here * factor if factor else 0.0
            entry.weight += factor
            return
        if factors is None:
            entry.weight += factor
        else:
            entry.weights = factors.clone() if entry.weights is None else entry.weights + factors
        if there is not None and factors is None and factor == 1.0:
            total = there.clone()
        else:
            there = self._data(here).mean() if there is None else there
            factors = self._data(factor).mean() if factors is None else factors
            total = torch.where(factors != 0, there * factors, 0.0)
        entry.totals = total if entry.totals is None else entry.totals + total

    def pending(self) -> list[Tensor]:
        """Returns the values of this step that are on the device, which are part of its program."""
        sums = (tensor for entry in self._entries.values() for tensor in (entry.totals, entry.weights))
        return [tensor for tensor in sums if tensor is not None]

    def row(self) -> LoggedRow:
        """Returns what this replica contributes to the exchange of a step. A collective in the first two steps.

        Raises:
            UserCodeError: the other replicas log other names than this one, which on a chip would block them all.
        """
        # In two steps: the hooks of the first step run after its exchange, and the second step is compiled anyway.
        if self._rows < 2:
            self.agree()
        self._rows += 1
        table = self._table
        known = {name: entry for name, entry in {**self._waiting, **self._entries}.items() if name in table}
        self._waiting = {name: entry for name, entry in {**self._waiting, **self._entries}.items() if name not in table}
        self._entries = {}
        if self._waiting and len(table) >= MOST_NAMES:
            self._warn_full(next(iter(self._waiting)))
            self._waiting = {}
        names = tuple(table)
        self._check_alike(tuple(name for name in names if name in known and known[name].totals is not None))
        return LoggedRow(names, self._values([known.get(name) for name in names]))

    def _values(self, entries: Sequence[_StepSums | None]) -> Tensor:
        """Returns the values of a `LoggedRow`; an entry is None for a name that was not logged."""
        numbers: list[float] = [float(bool(self._waiting))]
        tensors: list[Tensor | None] = [None]
        for entry in entries:
            numbers += (0.0, 0.0) if entry is None else (entry.total, entry.weight)
            tensors += (None, None) if entry is None else (entry.totals, entry.weights)
        # Room for later names: every change of the size would compile another program.
        room = 1 + 2 * _ROOM * max(1, -(-len(entries) // _ROOM))
        numbers += [0.0] * (room - len(numbers))
        tensors += [None] * (room - len(tensors))
        if self._sent is None or self._sent[0] != numbers:
            self._sent = numbers, self._backend.numbers(numbers)
        rows = self._sent[1]
        values = rows.reshape(-1) if len(rows) == 1 else rows.mean(dim=0)
        if all(tensor is None for tensor in tensors):
            return values
        zero = torch.zeros((), device=values.device)
        return values + torch.stack([zero if tensor is None else tensor for tensor in tensors])

    def agree(self) -> bool:
        """Adds the new names of all replicas to the table; returns whether one of them has values that were not
        exchanged yet. A collective."""
        table, values = dict(self._table), {**self._waiting, **self._entries}
        new = [[name, asdict(entry.style)] for name, entry in values.items() if name not in table]
        text = json.dumps(new[:MOST_NAMES]).encode()
        summary = [checksum(text), float(len(text)), float(bool(values))]
        rows = self._backend.gather(summary)
        texts = [text]
        if any(row[:2] != summary[:2] for row in rows):
            longest = int(max(length for _, length, _ in rows))
            encoded = self._backend.gather([float(byte) for byte in text.ljust(longest)])
            texts = [bytes(int(byte) for byte in row) for row in encoded]
        for text in texts:
            for name, style in json.loads(text):
                if len(table) < MOST_NAMES:
                    table.setdefault(name, Style(**style))
        self._table = table
        return any(values for *_, values in rows)

    def read(self, first: int, readings: Sequence[tuple[tuple[str, ...], Sequence[float]]]) -> bool:
        """Records the sums of the steps from `first` on; returns whether a replica has new names (see `agree`)."""
        for step, (names, (_, *numbers)) in enumerate(readings, first):
            while self._boundaries and self._boundaries[0] < step:
                self._end_epoch(self._boundaries.pop(0))
            for name, total, weight in zip(names, numbers[0::2], numbers[1::2], strict=False):
                if weight != 0:
                    self._note(step, name, total, weight)
        return any(news > 0 for _, (news, *_) in readings)

    def end_epoch(self, step: int) -> None:
        """Ends an epoch with `step`, which may not have been read yet."""
        self._boundaries.append(step)

    def finish(self, step: int) -> None:
        """Exchanges, after the last step, what hooks have logged since, and ends the epoch. A collective."""
        if self.agree():
            row = self.row()
            _, total = self._backend.reduce([], row.values)
            (here,) = self._backend.to_host([total])
            self.read(step, [(row.names, here.tolist())])
        self._end_epoch(step)

    def take(self) -> list[LoggedCurve]:
        """Returns the values read since the last call."""
        curves, self._points = self._points, {}
        return [LoggedCurve(name, tuple(points), shown) for (name, shown), points in curves.items()]

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON: the sums of the current epoch, over all steps that were read."""
        return {name: asdict(epoch) for name, epoch in self._epochs.items()}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restores a `state`; None comes from an older checkpoint, which does not have it."""
        for name, epoch in (state or {}).items():
            self._epochs[name] = _EpochSums(**{**epoch, "style": Style(**epoch["style"])})

    def _note(self, step: int, name: str, total: float, weight: float) -> None:
        style = self._table[name]
        if style.epoch:
            epoch = self._epochs.setdefault(name, _EpochSums(style))
            epoch.total += total
            epoch.weight += weight
        if style.step:
            self._point(step, name, style, "step", total, weight)

    def _end_epoch(self, step: int) -> None:
        for name, epoch in self._epochs.items():
            self._point(step, name, epoch.style, "epoch", epoch.total, epoch.weight)
        self._epochs = {}

    def _point(self, step: int, name: str, style: Style, per: str, total: float, weight: float) -> None:
        value = total if style.kind == "sum" else total / weight if weight else math.nan
        # As Lightning names them, if there are both.
        reported = f"{name}_{per}" if style.step and style.epoch else name
        self._points.setdefault((reported, style.shown), []).append((step, value))

    def _data(self, number: float) -> Tensor:
        """Returns the number on the device, as `Backend.numbers` does. A constant would be another program."""
        if number not in self._numbers:
            if len(self._numbers) >= _CACHED:
                self._numbers.clear()
            self._numbers[number] = self._backend.numbers([number])
        return self._numbers[number]

    def _check_alike(self, pattern: tuple[str, ...]) -> None:
        """Checks, before a replica on a chip runs a new program, that the others run it, too. The first steps' programs
        are compared as a whole (doctor.agreement)."""
        backend = self._backend
        if pattern in self._patterns or not (backend.one_program and backend.terms > 1) or backend.store is None:
            return
        self._patterns.add(pattern)
        at = f"logged/{zlib.crc32(json.dumps(pattern).encode())}"
        try:
            if backend.store.add(at, 1) == backend.world:
                backend.store.set(f"{at}/all", "")
            backend.store.wait([f"{at}/all"], timedelta(seconds=AGREEMENT_SECONDS))
        except RuntimeError as error:
            raise UserCodeError(
                f"process {backend.rank} logs values of {', '.join(pattern) or 'nothing'} in this step, but not all "
                f"others do ({str(error).partition(chr(10))[0]}); log must not depend on the rank or the data"
            ) from None

    def _warn_full(self, name: str) -> None:
        if not self._full:
            self._full = True
            self._warn(
                f'a run can log {MOST_NAMES} names, and "{name}" and others are too many: their values are dropped. A '
                "name must not depend on the step or the data"
            )


@contextmanager
def use_book(book: Logbook | None) -> Iterator[None]:
    """Makes `log` write to `book` while the block runs in this thread; with None, its values are ignored."""
    before = getattr(_OPEN, "book", None)
    _OPEN.book = book
    try:
        yield
    finally:
        _OPEN.book = before


def plain_name(name: Any) -> str:
    """Returns the name with characters replaced that could do harm on a terminal or in a file.

    Raises:
        UserCodeError: it is empty, too long, or no text.
    """
    if not isinstance(name, str) or not name.strip() or len(name) > NAME_LENGTH:
        got = f"{len(name)} characters" if isinstance(name, str) else f"a {type(name).__name__}"
        raise UserCodeError(f"log: a name must be text of 1 to {NAME_LENGTH} characters, got {got}")
    return "".join(character if character.isprintable() else "?" for character in name)


def number_in(what: str, value: Any) -> float:
    """Returns the single number in the value. Raises UserCodeError if it is none; `what` names it."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UserCodeError(f"{what}: a single number is needed, got {got}") from None


def _number(name: str, value: Any, what: str = "value") -> tuple[float, Tensor | None]:
    """Returns the number, if it is on the host, or else a tensor of shape [] on the device."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UserCodeError(f'log("{name}"): the {what} must be a single number, got shape {list(value.shape)}')
        if value.device.type != "cpu":
            return 0.0, value.detach().reshape(()).float()
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value), None
    except (TypeError, ValueError, OverflowError):
        raise UserCodeError(
            f'log("{name}"): the {what} must be a number or a tensor with one element, got a {type(value).__name__}'
        ) from None
