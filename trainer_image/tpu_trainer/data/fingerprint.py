"""An example's fingerprint in a few numbers, by which processes find out whether they read the same data.

It separates four kinds of content, since they are comparable to different degrees: an augmentation with its own random
generators changes the array and not the label, a temporary directory changes a path and nothing else.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

KINDS = ("numbers", "arrays", "texts", "reals")
"""Single whole numbers (and the shape of the example); arrays of whole numbers, and bytes; texts; real numbers."""

WIDTH = len(KINDS) + 1
"""Numbers per example: a checksum for each of the first three kinds, a weighted sum of the reals, and their norm."""

_CHECKSUM = 2**24
"""Whole numbers below it are exact in float32, which a gather carries."""

_TOLERANCE = 1e-3
"""Reals count as equal up to this part of their norm: hosts with different CPUs round differently."""

_MOST_ELEMENTS = 2**16
_DEEPEST = 8


@dataclass
class _Content:
    numbers: list[bytes] = field(default_factory=list)
    arrays: list[bytes] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    reals: list[npt.NDArray[np.float64]] = field(default_factory=list)


def fingerprint(example: Any) -> list[float]:
    """Returns `WIDTH` finite numbers, exact in float32. A checksum or norm of -1 means that there is no such
    content."""
    content = _Content()
    _collect(example, content, 0)
    sums = [_checksum(part) for part in (content.numbers, content.arrays, content.texts)]
    if not content.reals:
        return [*sums, 0.0, -1.0]
    reals = np.concatenate(content.reals)
    # Bounded, because squares follow; NaN is an ordinary value here.
    reals = np.clip(np.nan_to_num(reals, nan=-1.25, posinf=1e15, neginf=-1e15), -1e15, 1e15)
    # Any weights that differ from each other will do.
    weights = np.cos(1.7 * np.arange(len(reals)))
    return [*sums, float(weights @ reals), math.sqrt(float(reals @ reals))]


def compare_kinds(left: Sequence[float], right: Sequence[float]) -> list[bool]:
    """Returns for each of KINDS whether two fingerprints agree."""
    bound = _TOLERANCE * max(left[-1], right[-1], 0.0)
    same_reals = (left[-1] < 0) == (right[-1] < 0) and abs(left[-2] - right[-2]) <= bound
    return [*(a == b for a, b in zip(left[:3], right[:3], strict=True)), same_reals]


def present_kinds(values: Sequence[float]) -> list[bool]:
    """Returns for each of KINDS whether the example has such content."""
    return [*(number >= 0 for number in values[:3]), values[-1] >= 0]


def _checksum(parts: list[bytes]) -> float:
    return float(zlib.crc32(b"|".join(parts)) % _CHECKSUM) if parts else -1.0


def _collect(value: Any, into: _Content, depth: int) -> None:
    if isinstance(value, Tensor):
        _add_array(_as_array(value), into)
    elif isinstance(value, bool | int | float | complex | np.ndarray | np.generic):
        _add_array(np.asarray(value), into)
    elif hasattr(value, "__array_interface__"):
        # For example a PIL image.
        _add_array(np.asarray(value), into)
    elif isinstance(value, str):
        into.texts.append(value.encode(errors="replace"))
    elif isinstance(value, bytes | bytearray):
        into.arrays.append(bytes(value))
    elif depth < _DEEPEST:
        for part in _parts(value):
            _collect(part, into, depth + 1)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif hasattr(value, "__dict__"):
        yield from vars(value).values()


def _as_array(tensor: Tensor) -> npt.NDArray[Any]:
    plain = tensor.detach().to("cpu")
    if plain.layout != torch.strided or plain.is_quantized:
        plain = plain.to_dense() if not plain.is_quantized else plain.dequantize()
    if plain.is_floating_point():
        plain = plain.to(torch.float64)
    array: npt.NDArray[Any] = plain.resolve_conj().resolve_neg().numpy()
    return array


def _add_array(array: npt.NDArray[Any], into: _Content) -> None:
    kind = array.dtype.kind
    into.numbers.append(f"{kind}{array.shape}".encode())
    if kind == "f" or kind == "c":
        into.reals.append(_real(array))
    elif kind in "biu":
        (into.numbers if array.size == 1 else into.arrays).append(np.ascontiguousarray(array).tobytes())
    elif kind in "SU":
        into.texts.extend(str(text).encode(errors="replace") for text in array.ravel())


def _real(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    flat = array.ravel()
    flat = flat[:: max(1, len(flat) // _MOST_ELEMENTS)]
    if flat.dtype.kind == "c":
        flat = np.stack([flat.real, flat.imag], axis=-1).ravel()
    return flat.astype(np.float64)
