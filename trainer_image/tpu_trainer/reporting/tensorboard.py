"""TensorBoard event files: one file per attempt, replaced by each new version."""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Mapping, Sequence
from ctypes import c_float
from typing import Any

import google_crc32c

from tpu_contract.protocol import Phase
from tpu_trainer.reporting.history import Sample
from tpu_trainer.task.logbook import LoggedCurve

OWN_BYTES = 64_000_000
"""The most bytes of the task's images, texts and histograms: they stay in memory, and each version of the file has them
all."""


class EventFile:
    """Collects scalars as the bytes of an event file.

    It keeps them in memory, because an object store takes only whole objects: 60 bytes per scalar, some 10 MB in
    100,000 steps. tensorboardX has the messages; its own file writers start a thread and compute checksums in Python.
    """

    def __init__(self, attempt: int) -> None:
        # TensorBoard sorts the files of a directory by the time in their names, and takes only names like this.
        self.name = f"events.out.tfevents.{int(time.time())}.attempt-{attempt}"
        self._bytes = io.BytesIO()
        self._room = OWN_BYTES
        self._event(0, {}, file_version="brain.Event:2")

    def add_sample(self, sample: Sample) -> None:
        first = sample.step - len(sample.losses) + 1
        for step, loss in enumerate(sample.losses, first):
            self._event(step, {"loss": loss})
        for step, norm in enumerate(sample.gradient_norms, first):
            self._event(step, {"gradient norm": norm})
        steps = len(sample.losses)
        known = {
            "recipe/learning rate": sample.learning_rate,
            "speed/examples per second": sample.examples_per_second,
            "speed/step milliseconds": 1000 * sample.seconds / steps,
            "speed/waiting for input": sample.split.get(Phase.INPUT, 0.0) / sample.seconds if sample.seconds else None,
            "speed/model flops utilisation": sample.mfu,
            "recipe/gradient noise scale": sample.noise_scale,
        }
        self._event(sample.step, {tag: value for tag, value in known.items() if value is not None})

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._event(step, {f"evaluation/{name}": value for name, value in metrics.items()})

    def add_curves(self, curves: Sequence[LoggedCurve]) -> None:
        for curve in curves:
            for step, value in curve.points:
                self._event(step, {f"training/{curve.name}": value})

    def summary(self, step: int, summary: Any) -> bool:
        """Adds a summary that the task has made, and returns True, if there is room for it."""
        size = summary.ByteSize()
        if self._room < size:
            return False
        self._room -= size
        self._write(step, summary)
        return True

    def content(self) -> bytes:
        return self._bytes.getvalue()

    def _event(self, step: int, values: Mapping[str, float], **more: str) -> None:
        # Imported here: tensorboardX takes seconds, and most runs write no event files.
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped, unused-ignore]

        # The message holds C floats. The conversion makes a number that is too large infinite, and not an error.
        tagged = [Summary.Value(tag=name, simple_value=c_float(value).value) for name, value in values.items()]
        self._write(step, Summary(value=tagged) if values else None, **more)

    def _write(self, step: int, summary: Any, **more: str) -> None:
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped, unused-ignore]

        event = Event(wall_time=time.time(), step=step, summary=summary, **more)
        self._bytes.write(_record(event.SerializeToString()))


def _record(data: bytes) -> bytes:
    """Returns a TFRecord: the length, its checksum, the data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Returns the CRC-32C, rotated and offset as the TFRecord format demands."""
    plain = google_crc32c.value(data)
    return struct.pack("<I", ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF)
