"""One process reads a checkpoint and passes it to the others, so that storage sends every byte once on any slice.

Small data goes through the gang's store: the checkpoint's name, the run's document, the tensors' names, types and
shapes, the values of the smallest tensors, or the reason why there is no checkpoint. All other values follow over the
interconnect, group by group, straight into their places. So only the reader holds the checkpoint in host memory.
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
from tpu_trainer.checkpoint.snapshot import (
    Snapshot,
    Tensors,
    hooks_state,
    restore_model,
    restore_optimizer,
    with_memory,
)
from tpu_trainer.contract import errors
from tpu_trainer.contract.errors import PeerLostError, TrainerError
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.backends.rendezvous import COLLECTIVE_SECONDS
from tpu_trainer.optim.sharding import OptimizerSharding, named_groups
from tpu_trainer.optim.update import Average, tensors_in

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.optim import Optimizer

SMALL = 64
"""Elements of the largest tensor whose values are sent with its name. Step counts are among these tensors: an optimizer
may look at their values while it loads its state."""

_PLACE = "begin"
_PIECE = 4 << 20
"""Bytes of one value in the store, which takes at most 8 MiB."""
_HEARD_SECONDS = 10.0


def read_once(backend: Backend, reads: bool, read: Callable[[], LoadedCheckpoint | None]) -> LoadedCheckpoint | None:
    """Calls `read` in the one process that `reads`, and returns its result in every process. A collective.

    In the other processes the larger tensors of the snapshot are on the meta device: they have no values yet.

    Raises:
        TrainerError: what `read` raises, in every process.
        PeerLostError: the process that reads went away.
    """
    store = backend.store
    if store is None:
        return read()
    if not reads:
        return _receive(store, backend.world - 1)
    try:
        checkpoint = read()
    except Exception as error:
        _send(store, {"error": type(error).__name__ if isinstance(error, TrainerError) else "", "text": str(error)})
        # The store may end with this process.
        with suppress(RuntimeError):
            store.wait([f"{_PLACE}/all-heard"], timedelta(seconds=_HEARD_SECONDS))
        raise
    checkpoint = None if checkpoint is None else replace(checkpoint, reader=backend.rank)
    _send(store, _as_json(checkpoint))
    return checkpoint


def give_model(checkpoint: LoadedCheckpoint, model: nn.Module, backend: Backend) -> None:
    """Gives the model, which is still on the host, the checkpoint's values, and places it. A collective.

    Raises:
        UserCodeError: as `restore_model`.
    """
    if _loads_in_its_own_way(model):
        restore_model(_fetch(checkpoint, "model", backend).snapshot, model)
    else:
        restore_model(checkpoint.snapshot, model)
    backend.place(model, checkpoint.reader)


def give_optimizer(
    checkpoint: LoadedCheckpoint, optimizer: Optimizer, backend: Backend, sharding: OptimizerSharding | None = None
) -> None:
    """Gives the optimizer, whose parameters are on the device, the checkpoint's state, or its part. A collective.

    Raises:
        UserCodeError: as `restore_optimizer`.
    """
    if sharding is not None:
        restore_optimizer(_divide(checkpoint, backend, sharding).snapshot, optimizer)
    elif _restores_in_its_own_way(optimizer):
        restore_optimizer(_fetch(checkpoint, "optimizer", backend).snapshot, optimizer)
    else:
        restore_optimizer(checkpoint.snapshot, optimizer)
        _deliver(tensors_in(list(optimizer.state.values())), checkpoint, backend)


def give_average(checkpoint: LoadedCheckpoint, average: Average, backend: Backend) -> None:
    """Gives the average of the weights the checkpoint's values. A collective."""
    stored = checkpoint.snapshot.tensors["ema"]
    average.load(stored)
    _deliver([average.tensors[name] for name in stored], checkpoint, backend)


def fetch_hooks_state(checkpoint: LoadedCheckpoint, backend: Backend) -> dict[str, Any]:
    """Returns the state of the task's hooks, with tensors on the host. A collective."""
    return hooks_state(_fetch(checkpoint, "hooks", backend).snapshot)


def fetch_all(checkpoint: LoadedCheckpoint, backend: Backend) -> LoadedCheckpoint:
    """Returns the checkpoint with all values in host memory, for a run that restores them in its own way. A
    collective."""
    for file in checkpoint.snapshot.tensors:
        checkpoint = _fetch(checkpoint, file, backend)
    return checkpoint


def _fetch(checkpoint: LoadedCheckpoint, file: str, backend: Backend) -> LoadedCheckpoint:
    """Returns the checkpoint with the values of all tensors of `file` in host memory."""
    tensors = {name: with_memory(tensor) for name, tensor in checkpoint.snapshot.tensors[file].items()}
    _deliver(tensors.values(), checkpoint, backend)
    return _with_tensors(checkpoint, file, tensors)


def _divide(checkpoint: LoadedCheckpoint, backend: Backend, sharding: OptimizerSharding) -> LoadedCheckpoint:
    """Returns the checkpoint with this replica's parts of the optimizer's state in host memory.

    Never holds more of the whole state than one group of tensors.
    """
    parts: dict[str, Tensor] = {}
    stored = checkpoint.snapshot.tensors["optimizer"]
    for names in named_groups(stored):
        # The reader has the values already.
        tensors_by_name = {name: with_memory(stored[name]) for name in names}
        _deliver(tensors_by_name.values(), checkpoint, backend)
        parts_by_name = {name: sharding.local_part(name, tensor) for name, tensor in tensors_by_name.items()}
        parts |= dict(zip(parts_by_name, backend.to_host(list(parts_by_name.values())), strict=True))
    return _with_tensors(checkpoint, "optimizer", parts)


def _with_tensors(checkpoint: LoadedCheckpoint, file: str, tensors: Tensors) -> LoadedCheckpoint:
    snapshot = replace(checkpoint.snapshot, tensors={**checkpoint.snapshot.tensors, file: tensors})
    return replace(checkpoint, snapshot=snapshot)


def _deliver(tensors: Iterable[Tensor], checkpoint: LoadedCheckpoint, backend: Backend) -> None:
    """Overwrites the larger tensors, on any device, with the reader's."""
    if backend.store is None:
        return
    # Pending work differs, because only one process has values. The broadcast must be the same program in all.
    backend.sync()
    backend.broadcast([tensor for tensor in tensors if tensor.numel() > SMALL], checkpoint.reader)


def _loads_in_its_own_way(model: nn.Module) -> bool:
    """Returns whether a module of the task has code that may look at the values while they are loaded."""
    return any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or not all(_is_torchs(getattr(type(module), name)) for name in ("load_state_dict", "_load_from_state_dict"))
        for module in model.modules()
    )


def _restores_in_its_own_way(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer may look at the values while it loads them, or keep them outside `state`."""
    return not all(
        _is_torchs(getattr(type(optimizer), name)) for name in ("state_dict", "load_state_dict", "__setstate__")
    )


def _is_torchs(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"


def _as_json(checkpoint: LoadedCheckpoint | None) -> dict[str, Any]:
    if checkpoint is None:
        return {}
    snapshot = checkpoint.snapshot
    every = [tensor for named in snapshot.tensors.values() for tensor in named.values()]
    small = {str(place): tensor for place, tensor in enumerate(every) if tensor.numel() <= SMALL}
    return {
        "folder": str(checkpoint.folder),
        "commit": checkpoint.commit.to_json().decode(),
        "reader": checkpoint.reader,
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


def _from_json(message: dict[str, Any]) -> LoadedCheckpoint | None:
    """Inverts `_as_json`; larger tensors have no values."""
    folder = Folder.parse(message.get("folder", ""))
    if folder is None:
        return None
    small = safetensors.torch.load(base64.b64decode(message["small"]))
    tensors: dict[str, dict[str, Tensor]] = {}
    place = 0
    for file, named in message["tensors"].items():
        tensors[file] = {}
        for name, (kind, shape) in named.items():
            held = small.get(str(place))
            tensors[file][name] = (
                torch.empty(shape, dtype=getattr(torch, kind), device="meta") if held is None else held
            )
            place += 1
    snapshot = Snapshot(message["step"], message["examples"], message["document"], message["trees"], tensors)
    return LoadedCheckpoint(folder, Commit.parse(message["commit"].encode()), snapshot, message["reader"])


def _send(store: Store, message: dict[str, Any]) -> None:
    data = base64.b64encode(zlib.compress(json.dumps(message).encode())).decode()
    pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
    try:
        for number, piece in enumerate(pieces):
            store.set(f"{_PLACE}/{number}", piece)
        store.set(f"{_PLACE}/pieces", str(len(pieces)))
    except RuntimeError as error:
        raise _peer_lost(error) from error


def _receive(store: Store, listeners: int) -> LoadedCheckpoint | None:
    try:
        store.wait([f"{_PLACE}/pieces"], timedelta(seconds=COLLECTIVE_SECONDS))
        count = int(store.get(f"{_PLACE}/pieces"))
        data = b"".join(store.get(f"{_PLACE}/{number}") for number in range(count))
        message = json.loads(zlib.decompress(base64.b64decode(data)))
        if "error" in message and store.add(f"{_PLACE}/heard", 1) == listeners:
            store.set(f"{_PLACE}/all-heard", "")
    except RuntimeError as error:
        raise _peer_lost(error) from error
    if "error" not in message:
        return _from_json(message)
    raise _failure(message["error"], message["text"])


def _failure(kind: str, text: str) -> TrainerError:
    """Returns the reader's error. `kind`: a class of `errors`, or "" for any other exception."""
    known: type[TrainerError] | None = getattr(errors, kind, None)
    return PeerLostError(f"the process that reads the checkpoint failed: {text}") if known is None else known(text)


def _peer_lost(error: RuntimeError) -> PeerLostError:
    reason = str(error).partition("\n")[0]
    return PeerLostError(f"a peer went away while the checkpoint to begin with was chosen: {reason}")
