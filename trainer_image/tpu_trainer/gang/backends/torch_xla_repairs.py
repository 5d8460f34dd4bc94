"""Repairs of torch_xla 2.9: gradients through frozen norms, copies that share memory, and the programs of its scan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch_xla.experimental import scan

_replacing = Lock()


def repair_frozen_norms() -> None:
    """Gives norms with running statistics in evaluation mode a backward pass on XLA, for the whole process.

    torch_xla has none: it looks for the statistics of the batch, which only training mode has, and raises. So here they
    are the multiplication and the addition that they come down to. That replaces the operation, not a function of
    torch's: batch norm, instance norm, their modules and whatever calls them end up here.
    """
    _replace("batch_norm", batch_norm, "AutogradXLA")


def repair_copies() -> None:
    """Gives the target of `copy_` its own memory on XLA, for the whole process.

    torch_xla lets it share the source's. A later step that changes the target in place, such as a moving average of
    weights, some of which are not trained, hands that memory over, and the source is lost. Not for every run: the
    step's results get another order, for which libtpu's compiler sums no gradients beside the backward pass.
    """
    _replace("copy", copy, "XLA")


def _replace(name: str, function: Callable[..., Any], key: str) -> None:
    # Replicas may be threads of one process.
    with _replacing:
        _library(name, function, key)


@cache
def _library(name: str, function: Callable[..., Any], key: str) -> torch.library.Library:
    """Replaces the operation for as long as the returned library lives."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(action="ignore"):
        library.impl(name, function, key)  # type: ignore[no-untyped-call]
    return library


def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Returns what `copy_` makes of `self`, as the functional `torch.copy`."""
    moved = src.to(self.device, self.dtype, non_blocking)
    moved = moved.clone() if moved is src else moved
    return moved if moved.shape == self.shape else torch.expand_copy(moved, self.shape)


def batch_norm(
    input: Tensor,  # noqa: A002 -- torch's own name
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Normalises as `torch.batch_norm` does, with the same parameters; in float32 for 16-bit inputs."""
    if training or running_mean is None or running_var is None or not torch.is_grad_enabled():
        args = (input, weight, bias, running_mean, running_var, training, momentum, eps)
        normed: Tensor = torch.native_batch_norm(*args)[0]
        return normed
    kind = torch.promote_types(input.dtype, torch.float32)
    scale = (running_var.to(kind) + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(kind)
    shift = -running_mean.to(kind) * scale
    if bias is not None:
        shift = shift + bias.to(kind)
    shape = [-1, *[1] * (input.dim() - 2)]
    return (input.to(kind) * scale.view(shape) + shift.view(shape)).to(input.dtype)


_find = scan.value_and_grad_partitioned


def repair_scans() -> None:
    """Makes torch_xla's scan, with which it runs nn.GRU, also distinguish programs by which inputs need a gradient.

    Scan keeps the programs of a pass for later passes and finds them by shapes alone. So a program from a pass without
    gradients (an evaluation, or a step with a frozen part below) would serve a later pass that needs the gradient of
    its input, and the layers below would silently get none.
    """
    scan.value_and_grad_partitioned = _find_by_need


def _find_by_need(
    fn: Any, init: Any, xs: Any, partition_fn: Any = scan.default_partition, is_fn_pure: Any = True
) -> Any:
    needs = tuple(leaf.requires_grad for leaf in tree_iter(xs))
    return _find(fn, init, xs, _variant(partition_fn, needs), is_fn_pure)


@cache
def _variant(partition_fn: Callable[..., Any], needs: tuple[bool, ...]) -> Callable[..., Any]:
    """Returns the same function as another object: torch_xla's key includes its identity."""
    return partial(partition_fn)
