"""The program that a sync would send to an XLA device."""

from __future__ import annotations

import gc

import torch
import torch_xla
from torch import Tensor


def live_tensors(device: torch.device) -> list[Tensor]:
    """Returns all referenced tensors on the device, in the order in which they were made.

    A tensor of torch_xla's wraps another, which is a separate object once a recorder has seen it. A gradient has no
    object until it is asked for.
    """
    # The other objects are released before any tensor is examined, which may end the tensor that it wraps.
    outer = [
        tensor
        for tensor in gc.get_objects()
        if issubclass(type(tensor), Tensor) and _is_on(device, tensor) and torch._is_functional_tensor(tensor)
    ]
    outer += [tensor.grad for tensor in outer if tensor.is_leaf and tensor.grad is not None]
    by_number: dict[int, Tensor] = {}
    for tensor in outer:
        # It was not reached through its owner, so it would not keep its storage alive.
        tensor._fix_weakref()
        by_number.setdefault(number_of(tensor), tensor)
    return [by_number[number] for number in sorted(by_number)]


def _is_on(device: torch.device, tensor: Tensor) -> bool:
    try:
        return tensor.device == device
    except RuntimeError:
        # A transfer to the device, which another thread makes, has just ended, and with it the tensor that it held.
        return False


def pending(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors that a sync would compute."""
    needed = torch_xla._XLAC._check_tensor_need_materialization(tensors)
    return [tensor for tensor, wanted in zip(tensors, needed, strict=True) if wanted]


def number_of(tensor: Tensor) -> int:
    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def stablehlo_of(outputs: list[Tensor]) -> str:
    text: bytes = torch_xla._XLAC._get_stablehlo(outputs, torch_xla._XLAC._xla_get_default_device(), [], False)
    return text.decode()
