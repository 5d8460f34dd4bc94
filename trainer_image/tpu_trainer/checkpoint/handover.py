"""One process reads a checkpoint, and the others get it from that one: storage gives every byte once, however large the
slice.

What is small goes through the gang's store: which checkpoint it is, the run's document, the tensors' names, types and
shapes, the values of the smallest, or why there is no checkpoint. All other values follow over the interconnect, group
by group, straight into the places that they are for. So no process but the reader holds the checkpoint in host memory.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from tpu_trainer.checkpoint.catalogue import LoadedCheckpoint
from tpu_trainer.checkpoint.commit import Commit, Folder
from tpu_trainer.checkpoint.snapshot import Snapshot, hooks_state, restore_model, restore_optimizer, with_memory
from tpu_trainer.contract import errors
from tpu_trainer.contract.errors import PeerLostError, TrainerError
from tpu_trainer.gang.backends.base import Backend, in_groups
from tpu_trainer.gang.backends.rendezvous import COLLECTIVE_SECONDS
from tpu_trainer.optim.update import Average, tensors_in

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.optim import Optimizer

    from tpu_trainer.optim.sharding import OptimizerSharding

SMALL = 64
"""Elements of a tensor whose values are told with its name. Step counts are among them: an optimizer may look at their
values while it loads its state."""

_PLACE = "begin"
_PIECE = 4 << 20
"""Bytes of a value in the store, which takes at most 8 MiB."""
_HEARD_SECONDS = 10.0


def read_once(backend: Backend, reads: bool, read: Callable[[], LoadedCheckpoint | None]) -> LoadedCheckpoint | None:
    """What `read` returns, in every process; only the one that `reads` calls it. A collective.

    In the other processes the larger tensors of the snapshot are on the meta device: they have no values yet.

    Raises:
        TrainerError: what `read` raises, in every process.
        PeerLostError: the process that reads went away.
    """
    store = backend.store
    if store is None:
        return read()
    if not reads:
        return _heard(store, backend.world - 1)
    try:
        found = read()
    except Exception as error:
        _tell(store, {"error": type(error).__name__ if isinstance(error, TrainerError) else "", "text": str(error)})
        # The store may end with this process.
        with suppress(RuntimeError):
            store.wait([f"{_PLACE}/all-heard"], timedelta(seconds=_HEARD_SECONDS))
        raise
    found = None if found is None else replace(found, reader=backend.rank)
    _tell(store, _described(found))
    return found


def give_model(found: LoadedCheckpoint, model: nn.Module, backend: Backend) -> None:
    """Gives the model, still on the host, the checkpoint's values, and places it. A collective.

    Raises:
        UserCodeError: as `restore_model`.
    """
    restore_model((_fetched(found, "model", backend) if _loads_in_its_own_way(model) else found).snapshot, model)
    backend.place(model, found.reader)


def give_optimizer(
    found: LoadedCheckpoint, optimizer: Optimizer, backend: Backend, sharding: OptimizerSharding | None = None
) -> None:
    """Gives the optimizer, whose parameters are on the device, the checkpoint's state, or its part. A collective.

    Raises:
        UserCodeError: as `restore_optimizer`.
    """
    if sharding is not None:
        restore_optimizer(_divided(found, backend, sharding).snapshot, optimizer)
    elif _restores_in_its_own_way(optimizer):
        restore_optimizer(_fetched(found, "optimizer", backend).snapshot, optimizer)
    else:
        restore_optimizer(found.snapshot, optimizer)
        _deliver(tensors_in(list(optimizer.state.values())), found, backend)


def give_average(found: LoadedCheckpoint, average: Average, backend: Backend) -> None:
    """Gives the average of the weights the checkpoint's values. A collective."""
    kept = found.snapshot.tensors["ema"]
    average.load(kept)
    _deliver([average.tensors[name] for name in kept], found, backend)


def fetch_hooks_state(found: LoadedCheckpoint, backend: Backend) -> dict[str, Any]:
    """The state that the task's hooks returned, with tensors on the host. A collective."""
    return hooks_state(_fetched(found, "hooks", backend).snapshot)


def fetch_all(found: LoadedCheckpoint, backend: Backend) -> LoadedCheckpoint:
    """With all values in host memory, for a run that restores them in its own way. A collective."""
    for file in found.snapshot.tensors:
        found = _fetched(found, file, backend)
    return found


def _fetched(found: LoadedCheckpoint, file: str, backend: Backend) -> LoadedCheckpoint:
    """With the values of all tensors of `file`, in host memory."""
    tensors = {name: with_memory(tensor) for name, tensor in found.snapshot.tensors[file].items()}
    _deliver(tensors.values(), found, backend)
    return replace(found, snapshot=replace(found.snapshot, tensors={**found.snapshot.tensors, file: tensors}))


def _divided(found: LoadedCheckpoint, backend: Backend, sharding: OptimizerSharding) -> LoadedCheckpoint:
    """With this replica's parts of the optimizer's state, in host memory; never more of the whole than one group."""
    parts: dict[str, Tensor] = {}
    kept = found.snapshot.tensors["optimizer"]
    names = iter(kept)
    for group in in_groups(kept.values()):
        # The reader has the values, and gives them away.
        whole = {next(names): with_memory(tensor) for tensor in group}
        _deliver(whole.values(), found, backend)
        own = {name: sharding.local_part(name, tensor) for name, tensor in whole.items()}
        parts |= dict(zip(own, backend.to_host(list(own.values())), strict=True))
    return replace(found, snapshot=replace(found.snapshot, tensors={**found.snapshot.tensors, "optimizer": parts}))


def _deliver(tensors: Iterable[Tensor], found: LoadedCheckpoint, backend: Backend) -> None:
    """Overwrites the larger tensors, wherever they are, with the reader's."""
    if backend.store is None:
        return
    # Pending work differs: only one process has values. The broadcast must be the same program in all.
    backend.sync()
    backend.broadcast([tensor for tensor in tensors if tensor.numel() > SMALL], found.reader)


def _loads_in_its_own_way(model: nn.Module) -> bool:
    """Whether a module of the task has code that may look at the values while they are loaded."""
    return any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or not all(_is_torchs(getattr(type(module), name)) for name in ("load_state_dict", "_load_from_state_dict"))
        for module in model.modules()
    )


def _restores_in_its_own_way(optimizer: Optimizer) -> bool:
    """Whether the optimizer may look at the values while it loads them, or keep them elsewhere than in `state`."""
    return not all(
        _is_torchs(getattr(type(optimizer), name)) for name in ("state_dict", "load_state_dict", "__setstate__")
    )


def _is_torchs(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"


def _described(found: LoadedCheckpoint | None) -> dict[str, Any]:
    """As JSON."""
    if found is None:
        return {}
    snapshot = found.snapshot
    every = [tensor for named in snapshot.tensors.values() for tensor in named.values()]
    small = {str(place): tensor for place, tensor in enumerate(every) if tensor.numel() <= SMALL}
    return {
        "folder": str(found.folder),
        "commit": found.commit.to_json().decode(),
        "reader": found.reader,
        "step": snapshot.step,
        "examples": snapshot.examples,
        "document": snapshot.document,
        "trees": snapshot.trees,
        "tensors": {
            file: {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in named.items()}
            for file, named in snapshot.tensors.items()
        },
        "small": base64.b64encode(safetensors.torch.save(small)).decode(),
    }


def _found(told: dict[str, Any]) -> LoadedCheckpoint | None:
    """The inverse of `_described`."""
    folder = Folder.parse(told.get("folder", ""))
    if folder is None:
        return None
    small = safetensors.torch.load(base64.b64decode(told["small"]))
    tensors: dict[str, dict[str, Tensor]] = {}
    place = 0
    for file, named in told["tensors"].items():
        tensors[file] = {}
        for name, (kind, shape) in named.items():
            held = small.get(str(place))
            tensors[file][name] = (
                torch.empty(shape, dtype=getattr(torch, kind), device="meta") if held is None else held
            )
            place += 1
    snapshot = Snapshot(told["step"], told["examples"], told["document"], told["trees"], tensors)
    return LoadedCheckpoint(folder, Commit.parse(told["commit"].encode()), snapshot, told["reader"])


def _tell(store: Store, message: dict[str, Any]) -> None:
    data = base64.b64encode(zlib.compress(json.dumps(message).encode())).decode()
    pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
    try:
        for number, piece in enumerate(pieces):
            store.set(f"{_PLACE}/{number}", piece)
        store.set(f"{_PLACE}/pieces", str(len(pieces)))
    except RuntimeError as error:
        raise _lost(error) from error


def _heard(store: Store, listeners: int) -> LoadedCheckpoint | None:
    try:
        store.wait([f"{_PLACE}/pieces"], timedelta(seconds=COLLECTIVE_SECONDS))
        count = int(store.get(f"{_PLACE}/pieces"))
        data = b"".join(store.get(f"{_PLACE}/{number}") for number in range(count))
        told = json.loads(zlib.decompress(base64.b64decode(data)))
        if "error" in told and store.add(f"{_PLACE}/heard", 1) == listeners:
            store.set(f"{_PLACE}/all-heard", "")
    except RuntimeError as error:
        raise _lost(error) from error
    if "error" not in told:
        return _found(told)
    raise _failure(told["error"], told["text"])


def _failure(kind: str, text: str) -> TrainerError:
    """`kind`: a class of `errors`, or "" for an error of the trainer itself."""
    known: type[TrainerError] | None = getattr(errors, kind, None)
    return PeerLostError(f"the process that reads the checkpoint failed: {text}") if known is None else known(text)


def _lost(error: RuntimeError) -> PeerLostError:
    reason = str(error).partition("\n")[0]
    return PeerLostError(f"a peer went away while the checkpoint to begin with was chosen: {reason}")
