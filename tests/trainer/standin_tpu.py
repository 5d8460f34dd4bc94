"""A stand-in for TorchTPU's device: tensors that count as on device "tpu", and a record of every replica's cuts.

A cut is where a device that puts work off has to do it: a value is read, the device is waited for, replicas meet in a
collective. Values are computed at once, in host memory. What differs from a host's tensor is that the trainer sees the
device "tpu", and that nothing gets from there to the host unrecorded. Replicas are threads of one process. It should be
a process of its own: torch knows only one other device per process, and forgets none.
"""

from __future__ import annotations

import enum
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore
from torch.overrides import TorchFunctionMode

from tests.trainer.in_threads import Meeting, side_by_side
from tpu_contract.run_spec import RunSpec, parse_run_spec
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import PeerLostError
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.stop import SharedStop, StopFlag
from tpu_trainer.gang.backends.group import ProcessGroup
from tpu_trainer.gang.backends.torch_dist import TorchDistributed, find_device
from tpu_trainer.worker.replica import run_replica

_READING = {
    *("cpu", "item", "tolist", "numpy", "__array__", "equal", "allclose", "is_nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__", "__contains__"),
}
"""Functions of tensors whose result is on the host."""

_THREAD = threading.local()

STRAY: list[str] = []
"""Cuts made outside of a replica's thread."""


def record(event: str, *tensors: Tensor) -> None:
    described = " ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)
    getattr(_THREAD, "events", STRAY).append(f"{event} {described}".strip())


class OnTpu(Tensor):
    """A tensor that counts as on the device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return torch.device("tpu")
        target = _target(func, args, kwargs)
        if func is Tensor.copy_ and not isinstance(args[0], OnTpu):
            return _plain(lambda: func(args[0], _read(args[1]), *args[2:], **kwargs))
        if func.__name__ in _READING or (func is Tensor.to and target == "cpu"):
            here = _read(next(each for each in args if isinstance(each, OnTpu)))
            return here if func in (Tensor.cpu, Tensor.to) else _plain(lambda: func(*args, **kwargs))
        if target is not None:
            args, kwargs = _on_cpu(args), _on_cpu(kwargs)
        result = _plain(lambda: func(*args, **kwargs))
        return result if target in ("cpu", "meta") else _on_tpu(result)


class _Placing(TorchFunctionMode):
    """What is made on the device or sent to it becomes `OnTpu`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, OnTpu) for kind in types) or _target(func, args, kwargs) != "tpu":
            return func(*args, **kwargs)
        result = func(*_on_cpu(args), **_on_cpu(kwargs))
        return _on_tpu(result.clone() if func is Tensor.to else result)


class _EagerMode(enum.Enum):
    DEFER_NEVER = 0
    DEFER_AND_FUSE = 1


def _for_torch_alone(*_: Any) -> NoReturn:
    raise RuntimeError("internal to TorchTPU: use torch.accelerator")


TPU = SimpleNamespace(
    EagerMode=_EagerMode,
    eager_mode=_EagerMode.DEFER_NEVER,
    manual_seed_all=lambda seed: None,
    _is_in_bad_fork=lambda: False,
    **dict.fromkeys(("is_available", "device_count", "set_device", "synchronize"), _for_torch_alone),
)
"""In the place of `torch.tpu`, with what release 0.2.0 lets others than torch call."""


def install() -> None:
    torch.utils.rename_privateuse1_backend("tpu")
    # Where TorchTPU is installed, it would take its own place (with TORCH_DEVICE_BACKEND_AUTOLOAD=0 it has not yet).
    sys.modules["torch_tpu"] = ModuleType("torch_tpu")
    torch._register_device_module("tpu", TPU)
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("tpu")
    torch.accelerator.device_count = lambda: 8
    # Later releases of torch ask whether an optimizer step is being captured.
    torch.accelerator.current_stream = lambda *_: SimpleNamespace(is_capturing=lambda: False)
    torch.accelerator.synchronize = lambda: record("cut")
    dist.Backend.register_backend("tpu_dist", lambda *_: None, devices=["tpu"])
    # As for every device whose tensors are not the host's.
    torch.__future__.set_overwrite_module_params_on_conversion(True)


class _ThreadGroup(ProcessGroup):
    """Collectives between threads."""

    def __init__(self, rank: int, size: int, store: Any, meeting: Meeting) -> None:
        super().__init__(rank, size, store, "tpu")
        self._meeting = meeting

    def close(self) -> None: ...

    def _together(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        given = args[1] if collective in (dist.all_gather, dist.all_gather_into_tensor) else args[0]
        assert isinstance(given, OnTpu), "a collective of the device on a tensor of the host"
        record(collective.__name__, given)
        try:
            values = self._meeting.exchange(self.rank, _plain(lambda: given.detach().clone()))
        except ConnectionError as error:
            raise PeerLostError("a peer went away") from error
        _plain(lambda: _apply(collective, args, kwargs, values))


def _apply(collective: Any, args: Any, kwargs: Any, values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        if collective is dist.all_reduce:
            args[0].copy_(sum(values[1:], values[0]))
        elif collective is dist.broadcast:
            args[0].copy_(values[kwargs["src"]])
        elif collective is dist.all_gather_into_tensor:
            args[0].copy_(torch.cat(list(values)))
        else:
            for row, value in zip(args[0], values, strict=True):
                row.copy_(value)


def run_replicas(document: dict[str, Any], directory: Path, world: int) -> tuple[list[Outcome], list[list[str]]]:
    """A whole run of `world` replicas of one host; the outcomes, and every replica's cuts in order.

    A replica is told to stop by a file `stop-RANK` in the directory.
    """
    meeting, store = Meeting(world), HashStore()
    # Not `report_directory`, for which the reporting replica would read its weights at the end.
    spec = parse_run_spec(document | {"report": {**document.get("report", {}), "uri": str(directory)}})

    def replica(rank: int) -> tuple[Outcome, list[str]]:
        _THREAD.events, _THREAD.rank = [], rank

        def meet(spec: RunSpec, environment: WorkerEnvironment, stop: StopFlag) -> TorchDistributed:
            device = find_device(spec.torch, rank)
            return TorchDistributed(_ThreadGroup(rank, world, store, meeting), device, rank, spec.torch.execution)

        environment = WorkerEnvironment(
            run_spec=directory / "run.json",
            host_index=0,
            num_hosts=1,
            master_addr="",
            master_port=0,
            local_rank=rank,
        )
        with _Placing():
            outcome = run_replica(spec, environment, SharedStop(directory / f"stop-{rank}"), _hung, meet=meet)
        meeting.leave()
        return outcome, _THREAD.events

    ended = side_by_side(world, replica)
    for error in ended:
        if isinstance(error, BaseException):
            raise error
    return [outcome for outcome, _ in ended], [events for _, events in ended]


def rank() -> int:
    """Of the replica whose thread this is."""
    found: int = _THREAD.rank
    return found


def _hung(outcome: Outcome) -> NoReturn:
    raise AssertionError(outcome.message)


def _read(tensor: Tensor) -> Tensor:
    record("read", tensor)
    return _plain(lambda: tensor.as_subclass(Tensor).clone())


def _plain(run: Callable[[], Any]) -> Any:
    with torch._C.DisableTorchFunction():
        return run()


def _on_tpu(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result if isinstance(result, OnTpu) else _plain(lambda: result.as_subclass(OnTpu))
    if isinstance(result, tuple | list):
        made = [_on_tpu(each) for each in result]
        return type(result)(made) if type(result) in (tuple, list) or not hasattr(result, "_fields") else result
    return result


def _target(func: Any, args: Any, kwargs: Any) -> str | None:
    """The type of the device that a call names, if it names one."""
    named = kwargs.get("device")
    if named is None and func is Tensor.to:
        named = next((each for each in args[1:] if isinstance(each, torch.device | str)), None)
        named = next((each.device for each in args[1:] if isinstance(each, Tensor)), named)
    return None if named is None else torch.device(named).type


def _on_cpu(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: _on_cpu(each) for name, each in given.items()}
    if isinstance(given, tuple):
        return tuple(_on_cpu(each) for each in given)
    if isinstance(given, torch.device) and given.type == "tpu":
        return torch.device("cpu")
    return "cpu" if isinstance(given, str) and given == "tpu" else given
