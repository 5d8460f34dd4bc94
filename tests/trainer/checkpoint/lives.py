"""The life of a job, as its storage sees it: attempts that choose a checkpoint, write more, and end in many ways.

What must be true at each point is computed from the objects themselves, without the trainer's reading of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import google_crc32c
import torch

from tests.trainer.checkpoint.faults import Fault, Faulty
from tests.trainer.checkpoint.runs import assert_same, author, snapshot
from tpu_contract.run_spec import BestSpec
from tpu_trainer.checkpoint.best import best_in
from tpu_trainer.checkpoint.catalogue import CheckpointTarget, LoadedCheckpoint, PeerParts, make_room, write
from tpu_trainer.checkpoint.commit import Author, Mark
from tpu_trainer.checkpoint.parts import CheckpointPart
from tpu_trainer.checkpoint.snapshot import Snapshot, tensor_files
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.loop.checkpoints import CheckpointStorage
from tpu_trainer.storage.store import ObjectStore

COMMIT = "COMMIT"


def content(attempt: int, step: int) -> float:
    """What fills the tensors of a checkpoint, so that each is known by them."""
    return 1000.0 * attempt + step


class OtherHost(PeerParts):
    """Host 1, which writes its part of a checkpoint straight into the storage."""

    def __init__(self, store: ObjectStore, folder: str, value: float) -> None:
        self._store, self._folder, self._value = store, folder, value

    def marks(self) -> Mapping[str, Mark]:
        files = dict(tensor_files({"model": {"v": torch.full((4,), self._value)}}, CheckpointPart(1, 2)))
        for name, data in files.items():
            self._store.put(f"{self._folder}/{name}", data)
        return {name: Mark.of(data) for name, data in files.items()}


@dataclass
class Began:
    """How an attempt began. `failure`: the trainer's error, None if it had none; `warnings`: in its status."""

    found: LoadedCheckpoint | None
    failure: Exception | None
    warnings: list[str]
    lines: list[str]


@dataclass
class Job:
    """One job on one store, whose true objects are in `store`. `best`: with keepBest. `parts`: two hosts write."""

    store: ObjectStore
    keep: int = 1
    best: BestSpec | None = None
    parts: bool = False
    by: Author = field(default_factory=author)

    def target(self, *faults: Fault) -> CheckpointTarget:
        return CheckpointTarget(Faulty(self.store, *faults), self.by, self.keep, self.best)

    def begin(self, attempt: int, *faults: Fault, elsewhere: Any = None) -> Began:
        """As a run does before its first step."""
        self.by = replace(self.by, attempt=attempt)
        began = Began(None, None, [], [])
        outputs: Any = SimpleNamespace(
            is_reporter=True,
            progress=SimpleNamespace(say=began.lines.append),
            add_finding=lambda finding: began.warnings.append(finding.message),
        )
        backend: Any = SimpleNamespace(store=None)
        try:
            began.found = CheckpointStorage(self.target(*faults), elsewhere).choose(backend, outputs)
        except Exception as failure:
            began.failure = failure
        return began

    def save(self, step: int, *faults: Fault, value: float | None = None) -> bool:
        """As a run does in its thread. Returns whether it counts as committed; `value`: of the step's evaluation."""
        target = self.target(*faults)
        taken, others = snapshot(step, content(self.by.attempt, step)), PeerParts()
        if self.parts:
            taken = replace(taken, part=CheckpointPart(0, 2))
            folder = f"step-{step:08}-{self.by.job}-{self.by.attempt}"
            others = OtherHost(self.store, folder, content(self.by.attempt, step))
        evaluation = None if value is None else {"error": value}
        try:
            write(target, taken, evaluation, others)
        except StorageError:
            return False
        with contextlib.suppress(StorageError):
            best = best_in(target)
            make_room(target, step, best)
        return True

    def written(self, step: int, attempt: int) -> Snapshot:
        """What a reader must get of a checkpoint, to the bit."""
        whole = snapshot(step, content(attempt, step))
        if not self.parts:
            return whole
        model = {**whole.tensors["model"], "v": torch.full((4,), content(attempt, step))}
        return replace(whole, tensors={**whole.tensors, "model": model})

    def check_found(self, found: LoadedCheckpoint) -> None:
        empty = {file: {} for file in ("model", "optimizer", "hooks", "ema")}
        expected = self.written(found.folder.step, found.folder.attempt)
        assert_same(found.snapshot, replace(expected, tensors={**empty, **expected.tensors}))


@dataclass(frozen=True, order=True)
class Kept:
    """A checkpoint as its objects show it: `examples` and `attempt` say how far it is."""

    examples: int
    attempt: int
    name: str
    value: float | None = None


def folders(store: ObjectStore) -> dict[str, dict[str, bytes]]:
    """The files of all checkpoints, by folder."""
    found: dict[str, dict[str, bytes]] = {}
    for path in store.list("step-0"):
        name, _, file = path.partition("/")
        found.setdefault(name, {})[file] = store.read(path)
    return found


def committed(store: ObjectStore) -> dict[str, dict[str, bytes]]:
    """The folders that vouch for something, whole or not."""
    no_commits = (b"", b"being deleted")
    return {name: files for name, files in folders(store).items() if files.get(COMMIT, b"") not in no_commits}


def intact(store: ObjectStore, by: Author, *, by_size: bool = False) -> list[Kept]:
    """The checkpoints of this job that nothing is wrong with, the newest first. `by_size`: as far as sizes show."""
    whole = []
    for name, files in committed(store).items():
        with contextlib.suppress(ValueError):
            told = json.loads(files[COMMIT])
            marks = {file: (mark["size"], by_size or mark["crc32c"]) for file, mark in told["files"].items()}
            here = {file: files[file] for file in marks if file in files}
            true = {file: (len(data), by_size or google_crc32c.value(data)) for file, data in here.items()}
            writer = told["author"]
            own = (writer["uid"], writer["fingerprint"]) == (by.uid, by.fingerprint)
            if own and told["format"] in (1, 2) and marks == true:
                value = (told.get("evaluation") or {}).get("error")
                whole.append(Kept(told["examples"], writer["attempt"], name, value))
    return sorted(whole, reverse=True, key=lambda kept: (kept.examples, kept.attempt))


Damage = Callable[[ObjectStore, str], None]
"""Something that happens to the checkpoint of that name."""


def _rewrite(file: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(store: ObjectStore, name: str) -> None:
        path = next(path for path in store.list(f"{name}/") if path.startswith(f"{name}/{file}"))
        store.put(path, change(store.read(path)))

    return damage


def _remove(file: str) -> Damage:
    def damage(store: ObjectStore, name: str) -> None:
        store.delete(next(path for path in store.list(f"{name}/") if path.startswith(f"{name}/{file}")))

    return damage


def _commit(change: Callable[[dict[str, Any]], None]) -> Damage:
    def changed(data: bytes) -> bytes:
        told = json.loads(data)
        change(told)
        return json.dumps(told).encode()

    return _rewrite(COMMIT, changed)


DAMAGE: dict[str, Damage] = {
    "a short file of weights": _rewrite("model", lambda data: data[:-7]),
    "a missing file of weights": _remove("model"),
    "a missing state.json": _remove("state.json"),
    "a flipped bit": _rewrite("optimizer", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "a short COMMIT": _rewrite(COMMIT, lambda data: data[:-7]),
    "a newer format": _commit(lambda told: told.update(format=3)),
    "another model or seed": _commit(lambda told: told["author"].update(fingerprint="other")),
}
"""After each of these a checkpoint cannot be continued, and must not be lost."""

HARMLESS: dict[str, Damage] = {
    "an author with a new field": _commit(lambda told: told["author"].update(cluster="west")),
    "a COMMIT with a new field": _commit(lambda told: told.update(signature="x")),
}
