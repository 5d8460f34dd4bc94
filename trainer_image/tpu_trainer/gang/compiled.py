"""trainer.torch.execution: Compile. torch.compile makes programs of a step's loss, its backward pass and its update.

Shapes are fixed: a batch of another shape is another program. Code that torch.compile does not take runs between two
programs. The exchange stays outside: all replicas meet there, compiled or not.

The compiler is imported only in runs that compile, because that takes seconds.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpu_trainer.contract.errors import BadSpecError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_BUILT_WITH_CPP = ("cpu", "cuda", "xpu")
"""Devices whose programs inductor builds with the system's C++ compiler; TorchTPU brings its own."""


class Compilations:
    """How many programs this process has compiled, and how long it took, by torch's own count."""

    def __init__(self) -> None:
        from torch._dynamo.utils import compilation_time_metrics, counters

        self._counters, self._times = counters, compilation_time_metrics

    @property
    def count(self) -> int:
        return self._counters["stats"]["unique_graphs"]

    @property
    def seconds(self) -> float:
        return sum(self._times.get("_compile.compile_inner", ()))


def check_compiler(device: str) -> None:
    """Raises BadSpecError if torch.compile cannot build programs for the device on this host."""
    if device not in _BUILT_WITH_CPP:
        return
    # Inductor's own choice on Linux.
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BadSpecError(
            f'trainer.torch.execution: "Compile" on device "{device}" needs a C++ compiler, and this image has no '
            f"{compiler}: install one (on Debian: the package g++), name another in the variable CXX, or use Eager"
        )


def compile_loss(loss: Callable[[Any, Any], Any], device: torch.device) -> Callable[[Any, Any], Any]:
    """Returns the task's loss, compiled to programs for the device; its gradients come from programs, too."""

    # A plain function, because the task's loss may be any callable object.
    def compiled_loss(model: Any, batch: Any) -> Any:
        return loss(model, batch)

    return _compile(compiled_loss, device)


def compile_update(optimizer: Optimizer, device: torch.device) -> bool:
    """Makes the optimizer's step a program; returns whether it is one now. Only torch's own optimizers qualify: others
    may read numbers that change from step to step, each of which would be another program."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    plain = optimizer.step
    held: list[Tensor] = []
    stateless: set[Tensor] = set()
    program = _compile(lambda: plain(), device)

    def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            return plain(closure)
        groups = optimizer.param_groups
        if joining := _find_joining(optimizer) - stateless:
            # torch 2.9 does not check a parameter's empty state again, so the program of a step that gives the
            # parameter its first momentum would do so in all further steps.
            stateless.update(joining)
            return plain()
        while len(held) < len(groups):
            held.append(torch.zeros((), device=device))
        originals: list[dict[str, Any]] = [
            {name: group[name] for name in ("lr", "foreach") if name in group} for group in groups
        ]
        try:
            for group, number in zip(groups, held, strict=True):
                # As data, because a rate that changes in every step would need a program in every step.
                number.fill_(group["lr"])
                group["lr"] = number
                # Adam refuses such a rate with foreach, which only saves launches: a program has one anyway.
                if "foreach" in group:
                    group["foreach"] = None
            return program()
        finally:
            for group, options in zip(groups, originals, strict=True):
                group.update(options)

    # Bound, because torch's schedulers wrap it as a method.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return True


def _find_joining(optimizer: Optimizer) -> set[Tensor]:
    """Returns the parameters that have a gradient and no state yet, unless none has a state."""
    if not any(optimizer.state.values()):
        return set()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {parameter for parameter in parameters if parameter.grad is not None and not optimizer.state.get(parameter)}


def _compile(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    from torch._dynamo import config

    # torch 2.9 does not check a parameter again that it has seen, so one that a hook unfreezes would never be trained.
    # Other releases may not have the setting.
    if hasattr(config, "skip_tensor_guards_with_matching_dict_tags"):
        config.skip_tensor_guards_with_matching_dict_tags = False
    backend = "tpu" if device.type == "tpu" else "inductor"
    program: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False)
    return program
