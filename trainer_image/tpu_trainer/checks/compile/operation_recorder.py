"""Records every operation of a step while it is traced: what it costs, and whether it fits into one fixed program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, _tensor_str
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch_xla.debug import metrics
from torch_xla.experimental import scan

HOST_READ, SHAPE, FALLBACK, DIFFERENT = "HostRead", "DynamicShape", "Fallback", "DifferentPrograms"

_NOT_THE_USERS = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["tpu_trainer"]))
_MOST_FINDINGS = 20

_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


@dataclass(frozen=True)
class TracingFinding:
    """An operation of the step that costs a run a compilation or a wait, or that ends this check.

    kind: one of the names above. operation: its name in PyTorch. where: FILE:LINE of the user's code, "" if none of it
    was running, as in the backward pass.
    """

    kind: str
    operation: str
    where: str
    shapes: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class DynamicShapeError(BaseException):
    """The step cannot be traced further. Not an Exception, so that the user's code does not take it for a failure."""

    def __init__(self, finding: TracingFinding) -> None:
        super().__init__(finding.operation)
        self.finding = finding


@dataclass(frozen=True)
class Operation:
    """A call of an operation: its name, the shapes of its results, its integer arguments, and the user's line."""

    name: str
    shapes: str
    numbers: tuple[int, ...]
    where: str


class OperationRecorder(TorchDispatchMode):
    """While entered, counts a step's operations and finds those that a program for a TPU cannot hold.

    flops: of matrix products, convolutions and attention, 2 per multiply-add, as in published utilisations; flops_wide:
    those with operands of float32 or wider. What is read from the device is answered with ones, so that the trace
    goes on; an operation whose result's shape depends on the data ends it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.flops_wide = 0
        self.operations: list[Operation] = []
        self.findings: dict[TracingFinding, None] = {}
        self._times = 1
        self._replaced = ExitStack()

    def __enter__(self) -> OperationRecorder:
        for module, name, function in (
            (_tensor_str, "_str", self._print),
            (scan, "_scan_impl_flat", self._scan),
            (scan, "value_and_grad_partitioned", self._prepare_scan),
        ):
            original = getattr(module, name)
            self._replaced.callback(setattr, module, name, original)
            setattr(module, name, partial(function, original))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._replaced.close()

    def _print(self, original: Callable[..., str], tensor: Tensor, **how: Any) -> str:
        """Describes a tensor, for which torch turns all modes off."""
        if tensor.device.type == "xla":
            # torch itself describes tensors, too, while it traces the body of a scan.
            if line := _users_line():
                self._find(TracingFinding(HOST_READ, "print", line, _shapes([tensor])))
            tensor = torch.ones(tensor.shape, dtype=tensor.dtype)
        return original(tensor, **how)

    def _scan(self, original: Callable[..., Any], body: Any, init: Any, xs: Any, **how: Any) -> Any:
        """Traces a loop, whose body torch_xla calls once."""
        with self._repeated(len(xs[0])):
            return original(body, init, xs, **how)

    def _prepare_scan(self, original: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Finds the two bodies of a loop, forward and backward. What it calls does not go into the program."""
        with self._repeated(0):
            return original(*args, **how)

    @contextmanager
    def _repeated(self, times: int) -> Iterator[None]:
        before = self._times
        self._times *= times
        yield
        self._times = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(value, Tensor) and value.device.type == "xla" for value in leaves):
            return func(*args, **kwargs)
        name = str(func._overloadpacket).replace("aten.", "aten::")
        if torch.Tag.data_dependent_output in func.tags and func is torch.ops.aten._local_scalar_dense.default:
            self._find(TracingFinding(HOST_READ, name, _users_line(), _shapes(leaves)))
            return _unit_value(args[0].dtype)
        if (copied := _host_copy(func, args, kwargs)) is not None:
            self._find(TracingFinding(HOST_READ, name, _users_line(), _shapes(leaves)))
            return copied
        if _is_dynamic(func, leaves):
            raise DynamicShapeError(TracingFinding(SHAPE, name, _users_line(), _shapes(leaves)))
        before = len(metrics.executed_fallback_ops())
        result = func(*args, **kwargs)
        if len(metrics.executed_fallback_ops()) > before:
            self._find(TracingFinding(FALLBACK, name, _users_line(), _shapes(leaves)))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            flops = self._times * int(count(*args, **kwargs, out_val=result))
            self.flops += flops
            kinds = [value.dtype for value in leaves if isinstance(value, Tensor) and value.is_floating_point()]
            self.flops_wide += flops * any(kind in (torch.float32, torch.float64) for kind in kinds)
        numbers = tuple(value for value in leaves if type(value) is int)
        self.operations.append(Operation(name, _shapes(tree_leaves(result)), numbers, _users_line()))
        return result

    def _find(self, finding: TracingFinding) -> None:
        if len(self.findings) < _MOST_FINDINGS:
            self.findings[finding] = None


def first_difference(steps: Sequence[Sequence[Operation]]) -> TracingFinding:
    """Finds where steps with different programs part; in the backward pass, the last line of the forward pass."""
    line = ""
    for before, *others in zip(*steps, strict=False):
        line = before.where or line
        for after in others:
            if (change := _change(before, after)) is not None:
                return TracingFinding(DIFFERENT, before.name, line, change)
    counts = [len(step) for step in steps]
    return TracingFinding(
        DIFFERENT, "", "", f"{counts[0]} operations, then {counts[-1]}" if len(set(counts)) > 1 else ""
    )


def _change(before: Operation, after: Operation) -> str | None:
    pairs = ((before.name, after.name), (before.shapes, after.shapes), (str(before.numbers), str(after.numbers)))
    return next((f"{earlier}, then {later}" for earlier, later in pairs if earlier != later), None)


def _is_dynamic(func: Any, leaves: list[Any]) -> bool:
    """Returns whether the result's shape depends on the data."""
    if func in _INDEXING:
        # The result has as many elements as a mask has ones.
        return any(isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8) for value in leaves[1:])
    return torch.Tag.dynamic_output_shape in func.tags and func is not torch.ops.aten.linalg_lstsq.default


def _host_copy(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Returns what a copy from the device into host memory leaves there, all ones; None for any other operation."""
    if func is torch.ops.aten._to_copy.default and _is_host(kwargs.get("device")):
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    if func is torch.ops.aten.copy_.default and _is_host(args[0].device):
        copied: Tensor = args[0].fill_(1)
        return copied
    return None


def _is_host(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"


def _unit_value(kind: torch.dtype) -> bool | int | float | complex:
    if kind == torch.bool:
        return True
    if kind.is_complex:
        return 1 + 0j
    return 1.0 if kind.is_floating_point else 1


def _shapes(values: list[Any]) -> str:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


def _users_line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", *_NOT_THE_USERS)) and "/site-packages/torch" not in name:
            if name.endswith("runpy.py") or ("/lib/python" in name and "site-packages" not in name):
                return ""
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short(name: str) -> str:
    try:
        return str(Path(name).relative_to(Path.cwd()))
    except ValueError:
        return name
