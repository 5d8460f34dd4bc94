"""A gang without processes: every replica is a thread, and the collectives are sums over shared lists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from tpu_trainer.gang.backends.base import Counters, to_rows
from tpu_trainer.gang.backends.feed import feed_in_turn


class Meeting:
    """Where replicas exchange values, round by round; waiting for one that has left is a ConnectionError."""

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
    """A backend on the CPU, but for the devices' own random numbers."""

    device = torch.device("cpu")
    local_rank = 0
    reads_free = True
    reads_together = False
    one_program = False

    def __init__(self, rank: int, world: int, meeting: Meeting, store: Any) -> None:
        self.rank, self.world, self.terms, self.store = rank, world, world, store
        self.drawing_rank = rank
        self._meeting = meeting

    def seed(self, seed: int) -> None: ...

    def place(self, model: torch.nn.Module, source: int = 0) -> None:
        with torch.no_grad():
            self.broadcast([*model.parameters(), *model.buffers()], source)

    def feed(
        self, batches: Iterator[tuple[Any, Any]], busy: Callable[[], AbstractContextManager[None]] | None = None
    ) -> AbstractContextManager[Iterator[tuple[Any, Any]]]:
        return feed_in_turn(batches, self.to_device)

    def marks(self, tensors: Sequence[Tensor]) -> list[object]:
        return [object() for _ in tensors]

    def numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([values])

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compilations(self) -> int:
        return 0

    def counters(self) -> Counters:
        return Counters()

    def graph_hash(self, tensors: Sequence[Tensor]) -> str | None:
        return None

    def barrier(self) -> None:
        self._meeting.exchange(self.rank, None)

    def close(self) -> None: ...

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        theirs = self._meeting.exchange(self.rank, [tensor.clone() for tensor in tensors])[source]
        for tensor, value in zip(tensors, theirs, strict=True):
            tensor.copy_(value)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in tensors]

    def to_device(self, batch: Any) -> Any:
        return batch

    def sync(self) -> None: ...

    def reduce(self, gradients: Sequence[Tensor], signals: Tensor) -> tuple[list[Tensor], Tensor]:
        assert all(tensor.dtype in (torch.float32, torch.float64) for tensor in (*gradients, signals))
        rows = self._meeting.exchange(self.rank, [*gradients, signals])
        *sums, total = [sum(parts[1:], parts[0]) for parts in zip(*rows, strict=True)]
        return sums, total

    def part(self, whole: Tensor) -> Tensor:
        return to_rows(whole, self.world)[self.rank].clone()

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        rows = self._meeting.exchange(self.rank, [part.clone() for part in parts])
        return [torch.cat(one) for one in zip(*rows, strict=True)]

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        return [list(one) for one in self._meeting.exchange(self.rank, torch.tensor(row).tolist())]


def side_by_side(count: int, run: Callable[[int], Any]) -> list[Any]:
    """Returns what `run` gives for 0 to `count`, each in a thread of its own; its errors stand in their places.

    No ThreadPoolExecutor: a data-loading worker that is forked from a thread of a pool joins the pool's threads at its
    exit. One of them is itself, so it ends with code 1, and if the loader sees that in time the test fails.
    """
    results: list[Any] = [None] * count

    def one(number: int) -> None:
        try:
            results[number] = run(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def in_threads(world: int, run: Callable[[ThreadBackend], Any], keep: type[Exception] | tuple[()] = ()) -> list[Any]:
    """What `run` gives in every replica, or its error of type `keep`; the first other error of a replica is raised."""
    meeting = Meeting(world)
    store = HashStore() if world > 1 else None

    def replica(rank: int) -> Any:
        try:
            return run(ThreadBackend(rank, world, meeting, store))
        except BaseException:
            meeting.leave()
            raise

    results = side_by_side(world, replica)
    errors = [result for result in results if isinstance(result, BaseException) and not isinstance(result, keep)]
    for error in sorted(errors, key=lambda error: isinstance(error, ConnectionError)):
        raise error
    return results
