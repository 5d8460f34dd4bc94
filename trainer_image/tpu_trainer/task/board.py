"""What a task writes into the report directly: images, texts, histograms and scalars, as for TensorBoard's writer.

Loggers call it at any step, with one replica's values, like a Lightning logger. It never waits for the other replicas
and reduces nothing over them: the reporting replica writes, and the others' calls do nothing. For values over all
replicas there is `log`.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.task.logbook import LoggedCurve, number_in, plain_name

_OPEN = threading.local()
"""Holds, as `board`, the board of the replica that this thread runs."""

_CHANNELS = {1: 0, 3: 2, 4: 6}
"""PNG's colour types by the number of channels."""


@dataclass
class Board:
    """Where one replica's writers write. writes: this is the reporting replica. last_step: returns the last step made.

    add_curves: takes numbers, which appear wherever the values of `log` do. add_summary: takes a Summary of TensorBoard
    and its step, and returns whether there was room. missing: why there is no event file, if so. say: prints a line to
    the log. together: all replicas read what one of them reads from its device (Backend.reads_together).
    """

    writes: bool
    last_step: Callable[[], int]
    add_curves: Callable[[Sequence[LoggedCurve]], None]
    add_summary: Callable[[int, Any], bool]
    missing: str | None
    say: Callable[[str], None]
    together: bool = False
    complained: bool = False

    def numbers(self, values: Mapping[str, Any], step: int | None) -> None:
        if self.writes or self.together:
            at = self.last_step() if step is None else int(step)
            curves = [
                LoggedCurve(plain_name(name), ((at, number_in(f'"{name}"', value)),), False)
                for name, value in values.items()
            ]
            if self.writes:
                self.add_curves(curves)

    def add(self, step: int | None, make: Callable[[], Any]) -> None:
        """Adds what `make` returns. `make` may read from the device: it is called only if there is an event file, or in
        every replica if all must read what one of them reads."""
        at = self.last_step() if step is None else int(step)
        made = make() if self.together else None
        if not self.writes:
            return
        missing = self.missing
        if missing is None and not self.add_summary(at, made if self.together else make()):
            missing = "the event file is full: a task may write 64 MB there"
        if missing is not None and not self.complained:
            self.complained = True
            self.say(f"what the task writes for TensorBoard is not kept: {missing}")


@contextmanager
def open_board(board: Board) -> Iterator[None]:
    """Makes writers in this thread write to `board` while the block runs."""
    _OPEN.board = board
    try:
        yield
    finally:
        _OPEN.board = None


class SummaryWriter:
    """The supported part of TensorBoard's SummaryWriter. Outside of a training its methods do nothing.

    Tags are TensorBoard's, and steps default to the last one made. A tensor is read from the device at once, which
    delays the step: write every few hundred steps.
    """

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None, *_: Any, **__: Any) -> None:
        """Adds a number, or a tensor with one element."""
        self._add(global_step, lambda summary: summary.scalar(plain_name(tag), number_in(f'"{tag}"', scalar_value)))

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Any], global_step: int | None = None) -> None:
        """Adds several scalars, each as MAIN_TAG/NAME."""
        for tag, value in tag_scalar_dict.items():
            self.add_scalar(f"{main_tag}/{tag}", value, global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None, *_: Any, **__: Any) -> None:
        """Adds a text, which TensorBoard shows as Markdown."""
        text = str(text_string).encode("utf-8", "replace").decode()
        self._add(global_step, lambda summary: summary.text(plain_name(tag), text))

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None, bins: Any = None, *_: Any) -> None:
        """Adds a histogram of the finite values. `bins`: as for numpy.histogram; 64 if left out."""

        def make(summary: Any) -> Any:
            array = _array(values)
            finite = array[np.isfinite(array)]
            return summary.histogram(
                plain_name(tag), finite if finite.size else np.zeros(1), 64 if bins in (None, "tensorflow") else bins
            )

        self._add(global_step, make)

    def add_image(
        self,
        tag: str,
        img_tensor: Any,
        global_step: int | None = None,
        walltime: float | None = None,
        dataformats: str = "CHW",
    ) -> None:
        """Adds an image of numbers from 0 to 1, or of bytes, with 1, 3 or 4 channels. `dataformats`: CHW, HWC or HW."""

        def make(summary: Any) -> Any:
            pixels = _pixels(tag, _array(img_tensor), dataformats)
            height, width, channels = pixels.shape
            content = _png(pixels)
            image = summary.Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=content)
            return summary.Summary(value=[summary.Summary.Value(tag=plain_name(tag), image=image)])

        self._add(global_step, make)

    def flush(self) -> None:
        """Does nothing: the report is written every few minutes and at the end."""

    def close(self) -> None:
        """Does nothing: the report ends with the run."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _unsupported("the writer", name, SummaryWriter)

    def _add(self, step: int | None, make: Callable[[Any], Any]) -> None:
        if (board := getattr(_OPEN, "board", None)) is not None:
            board.add(step, lambda: make(_summaries()))


class ReportLogger:
    """The `self.logger` of a LightningModule, whose values go into the report of the run."""

    name = "report"
    version = 0

    def __init__(self) -> None:
        self.experiment = SummaryWriter()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds this process's values without a reduction, like any Lightning logger; `self.log` reports means over
        all."""
        if (board := getattr(_OPEN, "board", None)) is not None:
            board.numbers(metrics, step)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Adds a table to TensorBoard's texts."""
        values = params if isinstance(params, Mapping) else vars(params)
        rows = "\n".join(f"| {name} | {value} |" for name, value in values.items())
        self.experiment.add_text("hyperparameters", f"| name | value |\n|---|---|\n{rows}")

    def save(self) -> None:
        """Does nothing: the report is written every few minutes and at the end."""

    def finalize(self, status: str) -> None:
        """Does nothing: the report ends with the run."""

    def __getattr__(self, name: str) -> NoReturn:
        error = _unsupported("the logger", name, ReportLogger)
        raise AttributeError(f"{error}. With spec.trainer.loop: Lightning in the job it is Lightning's own logger")


def _unsupported(what: str, name: str, kind: type) -> AttributeError:
    offered = ", ".join(sorted(name for name in [*vars(kind), "experiment"] if not name.startswith("_")))
    return AttributeError(f"{what} of tpu_trainer has no {name}; it has {offered}")


def _summaries() -> Any:
    # Imported here: it takes seconds, and most runs write nothing.
    from tensorboardX import summary  # type: ignore[import-untyped, unused-ignore]

    return summary


def _array(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _pixels(tag: str, values: Any, form: str) -> Any:
    """Returns the image as bytes, shape [height, width, channels]."""
    if form not in ("CHW", "HWC", "HW") or values.ndim != len(form):
        raise UserCodeError(f'add_image("{tag}"): dataformats must be CHW, HWC or HW and fit the shape {values.shape}')
    values = {"CHW": lambda: values.transpose(1, 2, 0), "HWC": lambda: values, "HW": lambda: values[:, :, None]}[form]()
    if values.shape[2] not in _CHANNELS or 0 in values.shape:
        raise UserCodeError(f'add_image("{tag}"): an image has 1, 3 or 4 channels and some pixels, got {values.shape}')
    if values.dtype == np.uint8:
        return values
    return np.nan_to_num(np.clip(values.astype(np.float32), 0, 1) * 255).astype(np.uint8)


def _png(pixels: Any) -> bytes:
    """Encodes bytes of shape [height, width, channels] as a PNG file (RFC 2083)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[channels], 0, 0, 0)
    # Each row begins with the number of its filter: 0, none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes())) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
