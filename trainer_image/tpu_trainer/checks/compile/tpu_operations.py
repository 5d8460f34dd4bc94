"""Operations that torch_xla 2.9 makes in another way on a TPU than on the CPU, where the check traces them.

A TPU's gathers and scatters compare all places of a table with the indices unless the table is large, and it resizes
images with calls of its own; on a CPU the gradient of a resize has no kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_LARGEST_DENSE = 8192 * 10
"""The most places that a dense gather compares with (torch_xla's data_ops.cpp)."""

_DENSE_SCATTER = 100
"""A scatter is dense if its table has no more than this many places for each index (xla_lower_util.cpp)."""

_SPLIT = 3.0
"""A gradient that shrinks both sides by more takes one side after the other (resize_ops.cpp)."""


@contextmanager
def operations_as_on_tpus() -> Iterator[None]:
    """Makes this process trace these operations as on a TPU."""
    made: dict[str, Callable[..., Tensor]] = {
        "gather": _gather,
        "scatter_add": lambda table, dim, index, new: _scatter(table, dim, index, new, adds=True),
        "scatter.src": lambda table, dim, index, new: _scatter(table, dim, index, new, adds=False),
        "scatter.value": _scatter_value,
        "upsample_nearest2d": _nearest,
        "upsample_nearest2d_backward": _nearest_backward,
        "upsample_bilinear2d": _bilinear,
        "upsample_bilinear2d_backward": _bilinear_backward,
    }
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):
            for name, function in made.items():
                library.impl(name, function, "XLA", allow_override=True)
        yield


def _gather(table: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if not table.dim() or not index.dim():
        return table.reshape(-1)[index.reshape(-1)].reshape(index.shape)
    dim %= table.dim()
    if index.dim() == 1:
        return table.index_select(0, index)
    if table.shape[dim] > _LARGEST_DENSE:
        return table[_places(dim, index)]
    # Along the other dimensions the index may be shorter.
    reached = table[tuple(slice(None) if at == dim else slice(length) for at, length in enumerate(index.shape))]
    return torch.where(_chosen(table, dim, index), reached.unsqueeze(dim + 1), 0).sum(dim, dtype=table.dtype)


def _scatter_value(table: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    return _scatter(table, dim, index, torch.full_like(index, value, dtype=table.dtype), adds=False)


def _scatter(table: Tensor, dim: int, index: Tensor, new: Tensor, *, adds: bool) -> Tensor:
    if not table.dim() or not index.numel():
        return table.clone()
    dim %= table.dim()
    new = new[tuple(slice(length) for length in index.shape)]
    if index.numel() * _DENSE_SCATTER < table.numel():
        return table.index_put(_places(dim, index), new, accumulate=adds)
    chosen = _chosen(table, dim, index)
    written = torch.where(chosen, new.unsqueeze(dim), 0).sum(dim + 1, dtype=table.dtype)
    is_written = chosen.any(dim + 1)
    missing = [table.shape[at] - written.shape[at] for at in reversed(range(table.dim()))]
    if any(missing):
        ends = [size for length in missing for size in (0, length)]
        written = torch.constant_pad_nd(written, ends)
        is_written = torch.constant_pad_nd(is_written, ends)
    return torch.where(is_written, table + written if adds else written, table)


def _chosen(table: Tensor, dim: int, index: Tensor) -> Tensor:
    """Returns whether an index is that of a place, with the places as a dimension before the index's own."""
    shape = [1] * (index.dim() + 1)
    shape[dim] = table.shape[dim]
    places = torch.arange(table.shape[dim], dtype=index.dtype, device=index.device)
    return index.unsqueeze(dim) == places.reshape(shape)


def _places(dim: int, index: Tensor) -> tuple[Tensor, ...]:
    """Returns the indices of each dimension."""
    found = []
    for at, length in enumerate(index.shape):
        shape = [1] * index.dim()
        shape[at] = length
        found.append(index if at == dim else torch.arange(length, device=index.device).reshape(shape))
    return tuple(found)


def _nearest(image: Tensor, size: Sequence[int], *scales: float | None) -> Tensor:
    return _resized("ResizeNearest", image, size, "00")


def _bilinear(image: Tensor, size: Sequence[int], align_corners: bool, *scales: float | None) -> Tensor:
    return _resized("ResizeBilinear", image, size, _corners(align_corners))


def _nearest_backward(gradient: Tensor, size: Sequence[int], before: Sequence[int], *scales: float | None) -> Tensor:
    return _shrunk("ResizeNearestGrad", gradient, before, "00")


def _bilinear_backward(
    gradient: Tensor, size: Sequence[int], before: Sequence[int], align_corners: bool, *scales: float | None
) -> Tensor:
    return _shrunk("ResizeBilinearGrad", gradient, before, _corners(align_corners))


def _corners(align: bool) -> str:
    return f"{align:d}{not align:d}"


def _resized(target: str, image: Tensor, size: Sequence[int], how: str) -> Tensor:
    if tuple(image.shape[2:]) == tuple(size):
        return image.clone()
    if tuple(image.shape[2:]) == (1, 1):
        return image.expand(*image.shape[:2], *size).clone()
    return _call(target, image.permute(0, 3, 2, 1), size, how).permute(0, 3, 2, 1)


def _shrunk(target: str, gradient: Tensor, before: Sequence[int], how: str) -> Tensor:
    (rows, columns), size = gradient.shape[2:], before[2:]
    if (rows, columns) == tuple(size):
        return gradient.clone()
    turned = gradient.permute(0, 3, 2, 1)
    if rows > _SPLIT * size[0] and columns > _SPLIT * size[1]:
        # A resize of the TPU's has its columns first.
        turned = _call(target, turned, (size[0], rows), how)
    return _call(target, turned, size, how).permute(0, 3, 2, 1)


def _call(target: str, turned: Tensor, size: Sequence[int], how: str) -> Tensor:
    from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call

    shape = [turned.shape[0], size[1], size[0], turned.shape[3]]
    made: Tensor = stablehlo_custom_call([turned], target, [shape], [turned.dtype], backend_config=f'"{how}"')
    return made
