"""Imports torch_xla without what no step needs, which is two thirds of its import.

To offer two functions of StableHLO's export and three of `functorch`, torch_xla 2.9 imports torch's compilers for GPUs
and CPUs. Functions that import them when they are called stand in for these five, only while torch_xla is imported:
then whoever imports the modules gets the real ones. The processes that torch_xla spawns for several chips import all
of it before this package's code runs.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

KNOWN = "2.9."
"""The release whose imports are known; any other one is imported as it is."""

_CALLED_ONLY = {
    "torch_xla.stablehlo": ("save_as_stablehlo", "save_torch_model_as_stablehlo"),
    "functorch.compile": ("aot_function", "default_partition", "make_boxed_func"),
}


def import_torch_xla() -> None:
    """Imports torch_xla. What an ordinary import leaves in it is there when it is first asked for."""
    stand_ins = {} if "torch_xla" in sys.modules else {name: _stand_in(name) for name in _left_out()}
    sys.modules.update(stand_ins)
    try:
        torch_xla: Any = importlib.import_module("torch_xla")
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
    if stand_ins:
        torch_xla.__getattr__ = _submodule


def _left_out() -> list[str]:
    """Returns the modules to leave out: none that is there already, and none of an unknown release."""
    try:
        is_known = version("torch_xla").startswith(KNOWN)
    except PackageNotFoundError:
        is_known = False
    return [name for name in _CALLED_ONLY if is_known and name not in sys.modules]


def _stand_in(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    for function in _CALLED_ONLY[name]:
        setattr(module, function, _deferred(name, function))
    return module


def _deferred(module: str, function: str) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*arguments, **keywords)

    call.__name__ = call.__qualname__ = function
    return call


def _submodule(name: str) -> types.ModuleType:
    if name in ("stablehlo", "_dynamo"):
        return importlib.import_module(f"torch_xla.{name}")
    raise AttributeError(f"module 'torch_xla' has no attribute {name!r}")
