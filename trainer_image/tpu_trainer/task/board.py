"""What a task writes into the report itself: images, texts, histograms and scalars, as TensorBoard's writer takes them.

Loggers call it, from one replica's view at whatever step they like, as a Lightning logger would be. It never waits for
the other replicas, and nothing is reduced over them: the reporting replica writes, the others' calls do nothing. Values
that all replicas share are `log`'s business.
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
from tpu_trainer.task.logbook import LoggedCurve, plain_name

_OPEN = threading.local()
"""The board of the replica that this thread runs, as `board`."""

_CHANNELS = {1: 0, 3: 2, 4: 6}
"""PNG's colour types by the number of channels."""


@dataclass
class Board:
    """Where one replica's writers write. writes: this is the reporting replica. last_step: the last step made.

    logged: takes numbers, for all that shows what `log` is given. summary: takes a Summary of TensorBoard's and its
    step, and returns whether there was room. missing: why there is no event file, if so. say: takes lines for the log.
    together: all replicas read what one of them reads from its device (Backend.reads_together).
    """

    writes: bool
    last_step: Callable[[], int]
    logged: Callable[[Sequence[LoggedCurve]], None]
    summary: Callable[[int, Any], bool]
    missing: str | None
    say: Callable[[str], None]
    together: bool = False
    said: bool = False

    def numbers(self, values: Mapping[str, Any], step: int | None) -> None:
        if self.writes or self.together:
            at = self.last_step() if step is None else int(step)
            curves = [
                LoggedCurve(plain_name(name), ((at, _number(name, each)),), False) for name, each in values.items()
            ]
            if self.writes:
                self.logged(curves)

    def add(self, step: int | None, make: Callable[[], Any]) -> None:
        """`make` may read from the device: it is called only if there is an event file, or in every replica if all must
        read what one of them reads."""
        at = self.last_step() if step is None else int(step)
        made = make() if self.together else None
        if not self.writes:
            return
        missing = self.missing
        if missing is None and not self.summary(at, made if self.together else make()):
            missing = "the event file is full: what a task writes there itself may have 64 MB"
        if missing is not None and not self.said:
            self.said = True
            self.say(f"what the task writes for TensorBoard is not kept: {missing}")


@contextmanager
def open_board(board: Board) -> Iterator[None]:
    """Writers write there while the block runs in this thread."""
    _OPEN.board = board
    try:
        yield
    finally:
        _OPEN.board = None


class SummaryWriter:
    """The part of TensorBoard's SummaryWriter that is served. Outside of a training its methods do nothing.

    Tags are TensorBoard's, and steps default to the last one made. A tensor is read from the device at once, which
    holds up the step: write every few hundred steps.
    """

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None, *_: Any, **__: Any) -> None:
        """A number, or a tensor with one element."""
        self._add(global_step, lambda summary: summary.scalar(plain_name(tag), _number(tag, scalar_value)))

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Any], global_step: int | None = None) -> None:
        """Several of them, each as MAIN_TAG/NAME."""
        for tag, value in tag_scalar_dict.items():
            self.add_scalar(f"{main_tag}/{tag}", value, global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None, *_: Any, **__: Any) -> None:
        """A text, which TensorBoard shows as Markdown."""
        text = str(text_string).encode("utf-8", "replace").decode()
        self._add(global_step, lambda summary: summary.text(plain_name(tag), text))

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None, bins: Any = None, *_: Any) -> None:
        """A histogram of the values that are finite. `bins`: as for numpy.histogram; 64 if it is left out."""

        def make(summary: Any) -> Any:
            found = _array(values)
            found = found[np.isfinite(found)]
            counted = found if found.size else np.zeros(1)
            return summary.histogram(plain_name(tag), counted, 64 if bins in (None, "tensorflow") else bins)

        self._add(global_step, make)

    def add_image(
        self,
        tag: str,
        img_tensor: Any,
        global_step: int | None = None,
        walltime: float | None = None,
        dataformats: str = "CHW",
    ) -> None:
        """An image of numbers from 0 to 1, or of bytes, with 1, 3 or 4 channels. `dataformats`: CHW, HWC or HW."""

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
        raise _not_served("the writer", name, SummaryWriter)

    def _add(self, step: int | None, make: Callable[[Any], Any]) -> None:
        if (board := getattr(_OPEN, "board", None)) is not None:
            board.add(step, lambda: make(_summaries()))


class ReportLogger:
    """What a LightningModule has as `self.logger`: its values go into the report of the run."""

    name = "report"
    version = 0
    save_dir = None
    log_dir = None

    def __init__(self) -> None:
        self.experiment = SummaryWriter()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """As a Lightning logger: this process's values, without a reduction. `self.log` gives means over all."""
        if (board := getattr(_OPEN, "board", None)) is not None:
            board.numbers(metrics, step)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """As a table among TensorBoard's texts."""
        given = params if isinstance(params, Mapping) else vars(params)
        rows = "\n".join(f"| {name} | {value} |" for name, value in given.items())
        self.experiment.add_text("hyperparameters", f"| name | value |\n|---|---|\n{rows}")

    def save(self) -> None:
        """Does nothing: the report is written every few minutes and at the end."""

    def finalize(self, status: str) -> None:
        """Does nothing: the report ends with the run."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _not_served("the logger", name, ReportLogger)


def _not_served(what: str, name: str, kind: type) -> AttributeError:
    offered = ", ".join(sorted(each for each in [*vars(kind), "experiment"] if not each.startswith("_")))
    return AttributeError(f"{what} of tpu_trainer has no {name}; it has {offered}")


def _summaries() -> Any:
    # Imported here: it takes seconds, and most runs write nothing.
    from tensorboardX import summary  # type: ignore[import-untyped, unused-ignore]

    return summary


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserCodeError(f'"{name}": a single number is needed, got a {type(value).__name__}') from None


def _array(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _pixels(tag: str, values: Any, form: str) -> Any:
    """Bytes, shape [height, width, channels]."""
    if form not in ("CHW", "HWC", "HW") or values.ndim != len(form):
        raise UserCodeError(f'add_image("{tag}"): dataformats must be CHW, HWC or HW and fit the shape {values.shape}')
    values = {"CHW": lambda: values.transpose(1, 2, 0), "HWC": lambda: values, "HW": lambda: values[:, :, None]}[form]()
    if values.shape[2] not in _CHANNELS or 0 in values.shape:
        raise UserCodeError(f'add_image("{tag}"): an image has 1, 3 or 4 channels and some pixels, got {values.shape}')
    if values.dtype == np.uint8:
        return values
    return np.nan_to_num(np.clip(values.astype(np.float32), 0, 1) * 255).astype(np.uint8)


def _png(pixels: Any) -> bytes:
    """The PNG file (RFC 2083) of bytes of shape [height, width, channels]."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[channels], 0, 0, 0)
    # Each row begins with its filter: none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes())) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
