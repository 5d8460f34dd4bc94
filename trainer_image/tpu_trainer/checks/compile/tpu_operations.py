"""Operations that torch_xla 2.9 makes in another way on a TPU than on the CPU, where the check traces them.

A TPU's gathers and scatters compare all places of a table with the indices unless the table is large, and it resizes
images with calls of its own; on a CPU the gradient of a resize has no kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

_LARGEST_DENSE = 8192 * 10
"""The most places that a dense gather compares with (torch_xla's data_ops.cpp)."""

_DENSE_SCATTER = 100
"""A scatter is dense if its table has no more than this many elements for each index (xla_lower_util.cpp)."""

_RESIZES = {"upsample_nearest2d": "ResizeNearest", "upsample_bilinear2d": "ResizeBilinear"}


@contextmanager
def operations_as_on_tpus() -> Iterator[None]:
    """Makes this process trace these operations as on a TPU."""
    made: dict[str, Any] = {"gather": _gather, "scatter_add": partial(_scatter, adds=True), "scatter.src": _scatter}
    for name, target in _RESIZES.items():
        made[name] = partial(_resize, target)
        made[f"{name}_backward"] = partial(_shrink, f"{target}Grad")
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings(action="ignore"):
            for name, function in made.items():
                library.impl(name, function, "XLA", allow_override=True)
        yield


def _gather(table: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if index.dim() < 2:
        return table.reshape(-1)[index]
    dim %= table.dim()
    if table.shape[dim] > _LARGEST_DENSE:
        return table[_places(dim, index)]
    # Along the other dimensions the index may be shorter.
    reached = table[tuple(slice(None) if at == dim else slice(length) for at, length in enumerate(index.shape))]
    return torch.where(_chosen(table, dim, index), reached.unsqueeze(dim + 1), 0).sum(dim, dtype=table.dtype)


def _scatter(table: Tensor, dim: int, index: Tensor, new: Tensor, *, adds: bool = False) -> Tensor:
    if not table.dim() or not index.numel():
        return table + new if adds and index.numel() else table.clone()
    dim %= table.dim()
    new = new[tuple(slice(length) for length in index.shape)]
    if index.numel() * _DENSE_SCATTER < table.numel():
        return table.index_put(_places(dim, index), new, accumulate=adds)
    chosen = _chosen(table, dim, index)
    written = torch.where(chosen, new.unsqueeze(dim), 0).sum(dim + 1, dtype=table.dtype)
    ends = [size for at in reversed(range(table.dim())) for size in (0, table.shape[at] - written.shape[at])]
    written, is_written = torch.constant_pad_nd(written, ends), torch.constant_pad_nd(chosen.any(dim + 1), ends)
    return torch.where(is_written, table + written if adds else written, table)


def _chosen(table: Tensor, dim: int, index: Tensor) -> Tensor:
    """Returns whether an index is that of a place, with the places as a dimension before the index's own."""
    places = torch.arange(table.shape[dim], dtype=index.dtype, device=index.device)
    return index.unsqueeze(dim) == places.reshape([-1] + [1] * (index.dim() - dim))


def _places(dim: int, index: Tensor) -> tuple[Tensor, ...]:
    """Returns the indices of each dimension."""
    return tuple(
        index if at == dim else torch.arange(length, device=index.device).reshape([-1] + [1] * (index.dim() - at - 1))
        for at, length in enumerate(index.shape)
    )


def _resize(target: str, image: Tensor, size: Sequence[int], *how: Any) -> Tensor:
    if tuple(image.shape[2:]) in ((1, 1), tuple(size)):
        return image.expand(*image.shape[:2], *size).clone()
    return _call(target, image, size, how)


def _shrink(target: str, gradient: Tensor, size: Sequence[int], before: Sequence[int], *how: Any) -> Tensor:
    # A gradient that shrinks to less than a third takes two calls on a TPU, one for each side.
    return gradient.clone() if tuple(size) == tuple(before[2:]) else _call(target, gradient, before[2:], how)


def _call(target: str, image: Tensor, size: Sequence[int], how: Sequence[Any]) -> Tensor:
    from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call

    # torch_xla's own order of an image's sides, and of the settings: the corners, or half of a pixel.
    turned = image.permute(0, 3, 2, 1)
    settings = f"{how[0]:d}{not how[0]:d}" if "Bilinear" in target else "00"
    shape = [turned.shape[0], size[1], size[0], turned.shape[3]]
    made: Tensor = stablehlo_custom_call([turned], target, [shape], [image.dtype], backend_config=f'"{settings}"')
    return made.permute(0, 3, 2, 1)
