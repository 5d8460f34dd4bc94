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
    # As inductor chooses it on Linux.
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BadSpecError(
            f'trainer.torch.execution: "Compile" on device "{device}" needs a C++ compiler, and this image has no '
            f"{compiler}: install one (on Debian: the package g++), name another in the variable CXX, or use Eager"
        )


def compile_loss(loss: Callable[[Any, Any], Any], device: torch.device) -> Callable[[Any, Any], Any]:
    """The task's loss as programs for the device; its gradients come from programs, too."""

    # A function of its own: the task's may be any object that can be called.
    def compiled_loss(model: Any, batch: Any) -> Any:
        return loss(model, batch)

    return _compiled(compiled_loss, device)


def compile_update(optimizer: Optimizer, device: torch.device) -> bool:
    """Makes the optimizer's step a program; returns whether it is one now. Only torch's own optimizers: others may read
    numbers that change from step to step, each of which would be another program."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    plain = optimizer.step
    held: list[Tensor] = []
    stateless: set[Tensor] = set()
    program = _compiled(lambda: plain(), device)

    def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            return plain(closure)
        groups = optimizer.param_groups
        if joining := _joining(optimizer) - stateless:
            # torch 2.9 does not look again at the empty state that it has seen, so the program of a step that gives a
            # parameter its first momentum would do so in all further steps.
            stateless.update(joining)
            return plain()
        while len(held) < len(groups):
            held.append(torch.zeros((), device=device))
        given: list[dict[str, Any]] = [
            {name: group[name] for name in ("lr", "foreach") if name in group} for group in groups
        ]
        try:
            for group, number in zip(groups, held, strict=True):
                # As data: a rate that changes in every step would be a program in every step.
                number.fill_(group["lr"])
                group["lr"] = number
                # Adam refuses such a rate with foreach, which only saves launches: a program has one anyway.
                if "foreach" in group:
                    group["foreach"] = None
            return program()
        finally:
            for group, options in zip(groups, given, strict=True):
                group.update(options)

    # Bound, because torch's schedulers wrap it as a method.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return True


def _joining(optimizer: Optimizer) -> set[Tensor]:
    """Returns the parameters that have a gradient and no state yet, unless none has a state."""
    if not any(optimizer.state.values()):
        return set()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {each for each in parameters if each.grad is not None and not optimizer.state.get(each)}


def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    from torch._dynamo import config

    # torch 2.9 does not look at a parameter again once it has seen it, so one that a hook unfreezes would never be
    # trained. Another torch may not have the setting.
    if hasattr(config, "skip_tensor_guards_with_matching_dict_tags"):
        config.skip_tensor_guards_with_matching_dict_tags = False
    backend = "tpu" if device.type == "tpu" else "inductor"
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False)
    return compiled
