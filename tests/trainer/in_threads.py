"""A gang without processes: every replica is a thread, and the collectives are sums over shared lists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class _Meeting:
    """Where replicas exchange values, round by round; whoever waits for one that has left gets a ConnectionError."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}
        self._done = [0] * world
        self._left = False

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What every rank gives in its round of the same number, in the order of ranks."""
        with self._changed:
            given = self._rounds.setdefault(self._done[rank], {})
            self._done[rank] += 1
            given[rank] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(given) == self._world or self._left)
            if len(given) < self._world:
                raise ConnectionError("another replica has left")
            return [given[other] for other in range(self._world)]

    def leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()


class ThreadBackend:
    """The parts of the protocol that an evaluation needs, on the CPU."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world: int, meeting: _Meeting) -> None:
        self.rank, self.world, self.terms = rank, world, world
        self._meeting = meeting

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor, first in zip(
            tensors, self._meeting.exchange(self.rank, [t.clone() for t in tensors])[0], strict=True
        ):
            tensor.copy_(first)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in tensors]

    def to_device(self, batch: Any) -> Any:
        return batch

    def sync(self) -> None: ...

    def reduce_bucket(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        assert all(tensor.dtype == torch.float32 for tensor in (*gradients, signals))
        rows = self._meeting.exchange(self.rank, [*gradients, signals])
        *sums, total = [sum(parts[1:], parts[0]) for parts in zip(*rows, strict=True)]
        return sums, total

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [list(one) for one in self._meeting.exchange(self.rank, torch.tensor(row).tolist())]


def in_threads(world: int, run: Callable[[ThreadBackend], Any]) -> list[Any]:
    """What `run` gives in every replica; the first error of a replica is raised."""
    meeting = _Meeting(world)

    def replica(rank: int) -> Any:
        try:
            return run(ThreadBackend(rank, world, meeting))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(replica, rank) for rank in range(world)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, ConnectionError)):
        raise error
    return [future.result() for future in futures]
