"""A snapshot as the files of a checkpoint, and back: safetensors for tensors, JSON for the rest, no pickles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import safetensors.torch

from tpu_trainer.checkpoint.snapshot import FILES, Snapshot, Tensors

STATE = "state.json"
_TENSORS = ".safetensors"


def files_of(snapshot: Snapshot) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file, one at a time: only one of them is in memory beside the snapshot."""
    for file, tensors in snapshot.tensors.items():
        if tensors:
            yield f"{file}{_TENSORS}", safetensors.torch.save(dict(tensors))
    state = {
        "step": snapshot.step,
        "examples": snapshot.examples,
        "document": snapshot.document,
        "trees": snapshot.trees,
    }
    yield STATE, json.dumps(state, indent=1).encode()


def snapshot_of(read: Callable[[str], bytes]) -> Snapshot:
    """The snapshot whose file of a name `read` gives; a file without tensors was never written and is b""."""

    def tensors(file: str) -> Tensors:
        data = read(f"{file}{_TENSORS}")
        return safetensors.torch.load(data) if data else {}

    state = json.loads(read(STATE))
    return Snapshot(
        state["step"],
        state["examples"],
        state["document"],
        state["trees"],
        {file: tensors(file) for file in FILES},
    )
