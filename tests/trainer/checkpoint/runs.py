"""Small states to write and read: made of a number, so that a test can tell whose they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tpu_trainer.checkpoint.catalogue import CheckpointTarget, LoadedCheckpoint, make_room, read_checked, write
from tpu_trainer.checkpoint.commit import Author, Commit, Folder
from tpu_trainer.checkpoint.search import SearchCriteria, search
from tpu_trainer.checkpoint.snapshot import Snapshot, parse_snapshot
from tpu_trainer.storage.store import ObjectStore

BATCH = 16


def author(attempt: int = 1, uid: str = "5f0c1234-8d7e", fingerprint: str = "f", batch: int = BATCH) -> Author:
    return Author(uid, attempt, fingerprint, world=2, global_batch=batch)


def snapshot(step: int, content: float | None = None, examples: int | None = None) -> Snapshot:
    """`content` fills its tensors; by default the step does."""
    value = float(step) if content is None else content
    return Snapshot(
        step,
        step * BATCH if examples is None else examples,
        {"content": value},
        {"optimizer": {"class": "SGD", "parameters": [], "state": {}}, "hooks": None},
        {"model": {"w": torch.full((3, 2), value)}, "optimizer": {"/0/m": torch.full((2,), value)}, "hooks": {}},
    )


def commit(store: ObjectStore, step: int, by: Author | None = None, keep: int = 100, **content: Any) -> None:
    """Writes a checkpoint and deletes what is then too much, as a run does."""
    target = CheckpointTarget(store, by or author(), keep)
    write(target, snapshot(step, **content))
    make_room(target, step)


def latest(store: ObjectStore, fingerprint: str, say: Callable[[str], None]) -> LoadedCheckpoint | None:
    """The newest of all checkpoints in `store`, of any writer."""

    def unfit(commit: Commit) -> str | None:
        return None if commit.author.fingerprint == fingerprint else "it is of another task, model or seed"

    def read(folder: Folder, commit: Commit) -> LoadedCheckpoint:
        files = parse_snapshot(commit.files, lambda file: read_checked(store, folder, commit, file))
        return LoadedCheckpoint(folder, commit, files)

    return search(store, SearchCriteria(unfit=unfit), read, say).taken


def flat(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{file}:{name}": tensor for file, named in tensors.items() for name, tensor in named.items()}


def assert_same(one: Snapshot, other: Snapshot) -> None:
    """Equal to the bit, types and shapes included."""
    assert (one.step, one.examples, one.document, one.trees) == (
        other.step,
        other.examples,
        other.document,
        other.trees,
    )
    left, right = flat(one.tensors), flat(other.tensors)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        assert tensor.reshape(-1).view(torch.uint8).equal(right[name].reshape(-1).view(torch.uint8)), name
