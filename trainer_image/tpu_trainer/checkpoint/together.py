"""The hosts of a gang write a checkpoint together: each writes a part, and then host 0 the COMMIT, with all marks.

They talk through the gang's key-value store, from the threads that write, so that no training step waits. Host 0 first
removes the COMMIT of an earlier write to the same folder, and then lets the others begin. If a part fails or does not
come, the checkpoint has no COMMIT, and is never taken for a complete one.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from threading import Event
from typing import TYPE_CHECKING

from tpu_trainer.checkpoint.catalogue import CheckpointTarget, PeerParts, delete_files, probe_writing, put_files
from tpu_trainer.checkpoint.commit import Folder, Mark
from tpu_trainer.checkpoint.parts import CheckpointPart, Item, describe_layout, divide
from tpu_trainer.checkpoint.snapshot import Tensors, tensor_files
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.backends.rendezvous import COLLECTIVE_SECONDS
from tpu_trainer.gang.gather import is_shared

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]

LAST_SECONDS = 10.0
"""The longest wait for another host once a peer is lost."""

_POLL_SECONDS = 0.1


def find_writers(
    target: CheckpointTarget, backend: Backend, hosts: int, host: int, leads: bool
) -> tuple[Writers | None, list[int]]:
    """Tests whether all hosts can write; returns the writers and the hosts that do not see what host 0 writes, or may
    not write. A collective.

    The writers are None if there is only one host, or a host that cannot write. `host`: this host's index, or -1 if
    another process of the host writes. `leads`: True in the process that reports.
    """
    if hosts == 1 or backend.store is None:
        return None, []
    number = 0
    if leads:
        number = random.SystemRandom().randrange(1, 1 << 24)
        with suppress(StorageError):
            target.store.put(_probe(target), str(number).encode())
    number = int(max(value for (value,) in backend.gather([float(number)])))
    able = True
    if host >= 0:
        try:
            able = target.store.read(_probe(target)) == str(number).encode()
            if able and not leads:
                probe_writing(target, f"-{host}")
        except StorageError:
            able = False
    rows = backend.gather([float(host), float(able)])
    if leads:
        with suppress(StorageError):
            target.store.delete(_probe(target))
    unable = sorted(int(index) for index, can in rows if not can)
    return (None if unable else Writers(backend, backend.store, hosts, host)), unable


class Writers:
    """The hosts that write together. `host`: this host's index; -1 in a process that writes nothing."""

    def __init__(self, backend: Backend, store: Store, hosts: int, host: int) -> None:
        self._backend, self._hosts, self.host = backend, hosts, host
        # A separate connection: one wait holds up all other requests on the same connection.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._saves = 0
        self._lost = Event()

    def divide(self, tensors: Mapping[Item, Tensor], parameters: Sequence[Sequence[str]]) -> list[set[Item]]:
        """Divides the next checkpoint among the hosts; one part if host 0 writes it alone. A collective.

        `parameters`: as for `describe_layout`.
        """
        self._saves += 1
        if not is_shared(describe_layout(tensors, parameters), self._backend):
            return [set(tensors)]
        return divide({item: tensor.nbytes for item, tensor in tensors.items()}, self._hosts)

    def channel(self, parts: int) -> Channel:
        """Returns the channel for the checkpoint that was divided last. `parts`: how many it has."""
        return Channel(self._store, f"save/{self._saves}", parts, self._lost)

    def peer_lost(self) -> None:
        """Shortens the wait for other hosts, because a lost one may have been writing a part."""
        self._lost.set()


class Channel(PeerParts):
    """The messages between the hosts about one checkpoint, for the threads that write."""

    def __init__(self, store: Store, place: str, parts: int, lost: Event, limit: float = COLLECTIVE_SECONDS) -> None:
        self._store, self._place, self._parts, self._lost, self._limit = store, place, parts, lost, limit
        self._begun = False

    def begin(self) -> None:
        self._begun = True
        self._set("go", "yes")

    def close(self) -> None:
        if not self._begun:
            with suppress(StorageError):
                self._set("go", "no")

    def marks(self) -> dict[str, Mark]:
        """Waits for all other hosts; returns the marks of their files.

        Raises:
            StorageError: a host could not write its part, or is lost.
        """
        marks: dict[str, Mark] = {}
        for host in range(1, self._parts):
            message = json.loads(self._await(str(host), f"host {host} did not write its part"))
            if "failure" in message:
                raise StorageError(f"host {host}: {message['failure']}")
            marks |= {name: Mark(**mark) for name, mark in message["files"].items()}
        # All hosts have read the keys; without this a long run would fill the store.
        for key in ("go", *map(str, range(1, self._parts))):
            with suppress(RuntimeError):
                self._store.delete_key(f"{self._place}/{key}")
        return marks

    def may_begin(self) -> bool:
        """Waits for host 0; returns False if it does not write this checkpoint."""
        return self._await("go", "host 0 did not begin") == b"yes"

    def send(self, host: int, marks: Mapping[str, Mark], failure: str | None = None) -> None:
        files = {name: asdict(mark) for name, mark in marks.items()}
        self._set(str(host), json.dumps({"files": files} if failure is None else {"failure": failure}))

    def _set(self, key: str, value: str) -> None:
        try:
            self._store.set(f"{self._place}/{key}", value)
        except RuntimeError as error:
            raise _unreachable(error) from error

    def _await(self, key: str, otherwise: str) -> bytes:
        begun = time.monotonic()
        try:
            while not self._store.check([f"{self._place}/{key}"]):
                waited = time.monotonic() - begun
                if waited > self._limit or (self._lost.is_set() and waited > LAST_SECONDS):
                    raise StorageError(otherwise)
                time.sleep(_POLL_SECONDS)
            return self._store.get(f"{self._place}/{key}")
        except RuntimeError as error:
            raise _unreachable(error) from error


def write_part(
    target: CheckpointTarget,
    folder: Folder,
    tensors: Mapping[str, Tensors],
    part: CheckpointPart,
    channel: Channel,
    host: int,
) -> None:
    """Writes this host's part and sends the result to host 0. Runs in a separate thread, and never raises."""
    failure = None
    marks: dict[str, Mark] = {}
    try:
        if not channel.may_begin():
            return
        put_files(target.store, folder, tensor_files(tensors, part), marks)
    except Exception as error:
        failure = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}".splitlines()[0]
        # On a full disk the files would block the next attempt.
        with suppress(StorageError):
            delete_files(target.store, folder, marks)
    # If the result does not reach host 0, it commits nothing.
    with suppress(StorageError):
        channel.send(host, marks, failure)


def _probe(target: CheckpointTarget) -> str:
    return f"step-probe-{target.author.job}-{target.author.attempt}-seen"


def _unreachable(error: RuntimeError) -> StorageError:
    reason = str(error).partition("\n")[0]
    return StorageError(f"the other hosts cannot be reached: {reason}")
