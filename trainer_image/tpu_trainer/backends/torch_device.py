"""The device and the collectives that `trainer.torch` names, or what there is instead."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from tpu_trainer.errors import BadSpecError
from tpu_trainer.spec import TorchSpec

_KINDS = ("cpu", "cuda", "xpu", "mps", "tpu")
"""Only for the message: any device type that is registered with torch is taken."""


def find_device(chosen: TorchSpec, local_rank: int) -> torch.device:
    """The device of a host's process `local_rank`, made the process's current one.

    Raises:
        BadSpecError: this torch does not have such a device or such collectives, or this host too few devices.
    """
    if chosen.device == "tpu":
        # TorchTPU registers the device and its collectives. Where it is missing, the checks say what is there.
        with suppress(ModuleNotFoundError):
            importlib.import_module("torch_tpu")
    module = _module(chosen.device)
    if module is None:
        found = ", ".join(kind for kind in _KINDS if _module(kind) is not None)
        raise BadSpecError(
            f'trainer.torch.device: torch {torch.__version__} finds no "{chosen.device}" on this host, but {found}'
        )
    _check_collectives(chosen)
    if chosen.device == "cpu":
        return torch.device("cpu")
    count = int(module.device_count())
    if count < chosen.processes_per_host:
        raise BadSpecError(
            f"trainer.torch.processesPerHost: {chosen.processes_per_host} processes need a device each, this host has "
            f"{count} of {chosen.device}"
        )
    if chosen.device == "tpu":
        # TorchTPU has given this process its one device already, and knows no other.
        return torch.device("tpu")
    module.set_device(local_rank)
    return torch.device(chosen.device, local_rank)


def _module(kind: str) -> Any:
    """torch's module for a type of device (torch.cuda), or None where there is no such device."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return None
    return module if module.is_available() else None


def _check_collectives(chosen: TorchSpec) -> None:
    known = {
        name: devices for name, devices in dist.Backend.backend_capability.items() if dist.is_backend_available(name)
    }
    if chosen.device not in known.get(chosen.collectives, ()):
        fitting = sorted(name for name, devices in known.items() if chosen.device in devices)
        raise BadSpecError(
            f'trainer.torch.collectives: torch {torch.__version__} has no "{chosen.collectives}" for device '
            f'"{chosen.device}", but {", ".join(fitting) or "none at all"}'
        )
