"""Refuses data that the task has divided among the processes itself.

The trainer takes each process's part of an order of the whole dataset. If a process sees only a part of the data, that
part is divided once more: some examples are never used and others twice, and nothing else reveals it. So before the
first step the processes compare the lengths of their data and a few examples.

Examples that differ are read again. If they then differ within a process, too, they depend on random numbers that the
trainer does not seed, and the difference proves nothing about the data: a warning, not an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.contract.findings import ranges
from tpu_trainer.data.fingerprint import KINDS, WIDTH, compare_kinds, fingerprint, present_kinds
from tpu_trainer.data.loading import (
    GENERATORS,
    NO_WORKERS,
    Order,
    Workers,
    epoch_order,
    evaluation_workers,
    has_length,
    held_out,
    is_sharded,
    keep_generators,
    length_of,
    name_held_out,
    seed_generators,
    state_of,
    training_workers,
)
from tpu_trainer.data.shards import forget_worker, open_shard
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.task.task import Task

COMPARED = 4
"""Examples of each dataset that are compared."""

_READ_AGAIN = 6
"""How often they are read again if they differ. Several times, since an augmentation may leave most examples alone."""

_HALF = 2**24
"""Whole numbers below it are exact in float32, which a gather carries."""

_MOST_NAMED = 4

WHOLE = "every process must see the whole dataset; the trainer shards it"

STREAM = (
    "every process must read the same stream. Do not split it by rank or host (split_by_node, split_dataset_by_node): "
    "give it num_shards and shard(index, count), and each process reads its own shards (docs/data.md)"
)

SHARD = (
    "shard(index, count) must give the same examples in every process, and the trainer deals out the shards. Do not "
    "split the data by rank or host as well (split_by_node, split_dataset_by_node)"
)

Read = Callable[[], Sequence[Any]]
"""Reads the examples that are compared: the same ones each time, with the same random numbers."""

Prints = Sequence[Sequence[Sequence[float]]]
"""For each process, or reading, the fingerprints of the compared examples."""


def check_lengths(task: Task, backend: Backend, host: int) -> None:
    """Compares the lengths of the data; a collective. `host`: this process's host.

    Raises:
        UserCodeError: in every process, when the lengths of their training or evaluation data differ.
    """
    if backend.world == 1:
        return
    # The length of an iterable dataset is unknown.
    sizes = {"training": length_of(task.train, "train") if has_length(task.train) else 0}
    sizes |= {name_held_out(name): length_of(dataset, name_held_out(name)) for name, dataset in held_out(task).items()}
    rows = backend.gather([host, *(part for size in sizes.values() for part in divmod(size, _HALF))])
    for place, kind in enumerate(sizes):
        high, low = 1 + 2 * place, 2 + 2 * place
        text = unequal_lengths(kind, [(int(row[0]), int(row[high]) * _HALF + int(row[low])) for row in rows])
        if text is not None:
            raise UserCodeError(text)


def unequal_lengths(kind: str, rows: Sequence[tuple[int, int]]) -> str | None:
    """Describes how the processes' lengths differ; None if all are equal. `rows`: each process's host and length."""
    hosts: dict[int, set[int]] = {}
    for host, length in rows:
        hosts.setdefault(length, set()).add(host)
    if len(hosts) == 1:
        return None
    parts: list[str] = []
    for length, group in list(hosts.items())[:_MOST_NAMED]:
        who = f"host{'s' if len(group) > 1 else ''} {ranges(sorted(group))}"
        parts.append(f"{who} {'have' if len(group) > 1 else 'has'} {length}{'' if parts else f' {kind} examples'}")
    more = "; and so on" if len(hosts) > _MOST_NAMED else ""
    return f"{', '.join(parts)}{more}: {WHOLE}"


def check_order(task: Task, seed: int, backend: Backend, host: int) -> None:
    """Checks that the task's order is a function of its arguments: the same in every process and at every call. A
    collective.

    Raises:
        UserCodeError: in every process, if it is not; or the order raised.
    """
    if task.order is None:
        return
    if not has_length(task.train):
        raise UserCodeError("the task's order is for map-style data (len() and [i]); a stream has its own order")
    size = length_of(task.train, "train")
    checksums = [zlib.crc32(epoch_order(size, seed, epoch, task.order).tobytes()) % _HALF for epoch in (0, 1, 0)]
    rows = backend.gather([host, *map(float, checksums)])
    if any(row[1] != row[3] for row in rows):
        raise UserCodeError(
            "the task's order of epoch 0 changes with every call, so a resumed run could not continue with it. Draw "
            "from torch's, numpy's or Python's own generator, which are seeded for every epoch, or from a generator "
            "that is made from epoch and seed"
        )
    if len({tuple(row[1:]) for row in rows}) > 1:
        orders = [[row[1:]] for row in rows]
        who = _parties([int(row[0]) for row in rows], orders, [True] * len(KINDS))
        raise UserCodeError(
            f"{who} have different orders of the training data: the task's order must not depend on the rank or the "
            "host. It is the order of the job, of which the trainer takes each process's part"
        )


def check_examples(task: Task, seed: int, backend: Backend, host: int) -> list[str]:
    """Compares a few examples of each map-style dataset, and of a sharded stream's first shard; returns warnings. A
    collective; not for other streams, whose first batch `check_stream` compares.

    Raises:
        UserCodeError: in every process, if they differ; or the dataset raised.
    """
    if backend.world == 1:
        return []
    warnings, workers = [], training_workers(task)
    if has_length(task.train):
        warnings.append(compare("training examples", _spread(task.train, seed), WHOLE, backend, host, workers))
    elif is_sharded(task.train):
        read = _first_of_shard(task.train, seed)
        warnings.append(compare("examples in training shard 0", read, SHARD, backend, host, workers))
    for name, dataset in held_out(task).items():
        kind, workers = f"{name_held_out(name)} examples", evaluation_workers(task, dataset)
        warnings.append(compare(kind, _spread(dataset, seed), WHOLE, backend, host, workers))
    return [text for text in warnings if text is not None]


def check_stream(stream: FirstBatch, backend: Backend, host: int) -> str | None:
    """Does what `check_examples` does for a stream without shards. Reads it once more if its examples differ, and then
    restores its state if it has one."""
    if backend.world == 1:
        return None
    return compare("examples in the training stream", stream.read, STREAM, backend, host)


class FirstBatch:
    """The first examples that a process has read of a stream, and how to read them again.

    Create it before the stream is read, and call it with the first batch.
    """

    def __init__(self, dataset: Any, order: Order, first_batch: int) -> None:
        self._dataset, self._order, self._number = dataset, order, first_batch
        self._resumes = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._before = order.start.dataset if order.start.offset else self._state()
        self._first: Sequence[Any] | None = None
        self._returned = False

    @property
    def known(self) -> bool:
        return self._first is not None

    def __call__(self, examples: Sequence[Any]) -> None:
        if self._first is None:
            self._first = examples[:COMPARED]

    def read(self) -> Sequence[Any]:
        if self._first is not None and not self._returned:
            self._returned = True
            return self._first
        now = self._state()
        if self._resumes and self._before is not None:
            self._dataset.load_state_dict(self._before)
        # Reads them as `stream_batches` does.
        with self._order.seeded(self._number, alike=True):
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(self._order.start.epoch)
            examples = iter(self._dataset)
        with self._order.seeded(self._number, alike=True):
            read = list(islice(examples, COMPARED))
        if self._resumes:
            self._dataset.load_state_dict(now)
        return read

    def _state(self) -> Mapping[str, Any] | None:
        with user_code("state_dict() of the task's dataset"):
            return state_of(self._dataset) if self._resumes else None


def _spread(dataset: Any, seed: int) -> Read:
    """Returns a reader of examples from all over a map-style dataset: the first ones of two shards may be equal."""

    def read() -> Sequence[Any]:
        size = len(dataset)
        indices = sorted({part * (size - 1) // (COMPARED - 1) for part in range(COMPARED)}) if size else []
        seed_generators(seed)
        return [dataset[index] for index in indices]

    return read


def _first_of_shard(stream: Any, seed: int) -> Read:
    def read() -> Sequence[Any]:
        seed_generators(seed)
        return list(islice(open_shard(stream, 0, 0), COMPARED))

    return read


def read_prints(read: Read, times: int, workers: Workers) -> Prints:
    """Returns the fingerprints of the examples, read `times` times. With `workers`, a worker reads: a file that the
    dataset opens at the first read must not be open in this process, or the training's workers would share its
    offset."""
    if not workers.count:
        with GENERATORS, keep_generators():
            return [[fingerprint(example) for example in read()] for _ in range(times)]
    loader: DataLoader[Any] = DataLoader(
        _Readings(read, times),
        batch_size=None,
        collate_fn=list,
        num_workers=1,
        worker_init_fn=workers.begin,
        generator=torch.Generator(),
    )
    prints: Prints = next(iter(loader))
    return prints


class _Readings(IterableDataset[Any]):
    """A dataset whose only example is all readings."""

    def __init__(self, read: Read, times: int) -> None:
        self._read, self._times = read, times

    def __iter__(self) -> Iterator[Any]:
        forget_worker()
        yield [[fingerprint(example) for example in self._read()] for _ in range(self._times)]


def compare(kind: str, read: Read, rule: str, backend: Backend, host: int, workers: Workers = NO_WORKERS) -> str | None:
    """Compares the examples that `read` returns in all processes; returns a warning, or None. A collective.

    kind: the name of the examples. rule: what would be right. workers: the task's workers for them.

    Raises:
        UserCodeError: in every process, if they differ for another reason than random numbers; or `read` raised.
    """
    with user_code(f"reading {kind}"):
        (local,) = read_prints(read, 1, workers)
    missing = [[-2.0] * WIDTH] * (COMPARED - len(local))
    rows = backend.gather([host, *(number for example in [*local, *missing] for number in example)])
    hosts = [int(row[0]) for row in rows]
    prints = [[row[at : at + WIDTH] for at in range(1, len(row), WIDTH)] for row in rows]
    if not any(_differing(prints)):
        return None
    with user_code(f"reading {kind} again"):
        again = read_prints(read, _READ_AGAIN, workers)
    steady = [not differs for differs in _differing([local, *again])]
    steady = [all(votes) for votes in zip(*backend.gather([float(vote) for vote in steady]), strict=True)]
    return judge_prints(kind, rule, hosts, prints, steady)


def judge_prints(kind: str, rule: str, hosts: Sequence[int], prints: Prints, steady: Sequence[bool]) -> str | None:
    """Judges fingerprints that differ; returns a warning, or None. hosts: the host of every process. steady: for each
    kind of content, whether every process reads the same at every read.

    Raises:
        UserCodeError: the examples are not the same.
    """
    differ = _differing(prints)
    differ_steadily = list(map(all, zip(differ, steady, strict=True)))
    # Content that is the same everywhere, although it changes from example to example, indicates the same data.
    changes, has = _differing([[example] for example in prints[0]]), present_kinds(prints[0][0])
    equal = [
        all(conditions) for conditions in zip(steady, (not differs for differs in differ), changes, has, strict=True)
    ]
    only_texts = differ_steadily == [name == "texts" for name in KINDS]
    if any(differ_steadily) and not (only_texts and any(equal)):
        raise UserCodeError(f"{_parties(hosts, prints, differ_steadily)} have different {kind}: {rule}")
    if only_texts:
        return (
            f"only the texts in the {kind} differ between {_parties(hosts, prints, differ)}. Names of files may "
            f"differ; if these are other examples, {rule}"
        )
    if any(equal):
        return None
    return (
        f"the {kind} cannot be compared between the processes: they change at every read, by random numbers that the "
        "trainer does not seed (the dataset has its own generator). If each process has other examples, and not only "
        f"other random numbers, {rule}"
    )


def _differing(prints: Prints) -> list[bool]:
    """Returns for each of KINDS whether any process differs from the first."""
    result = [False] * len(KINDS)
    for others in prints[1:]:
        for first, other in zip(prints[0], others, strict=True):
            same = compare_kinds(first, other)
            result = [known or not equal for known, equal in zip(result, same, strict=True)]
    return result


def _parties(hosts: Sequence[int], prints: Prints, kinds: Sequence[bool]) -> str:
    """Names the parties with the same content of `kinds`: "hosts 0-1 and host 2"."""
    parties: list[list[int]] = []
    for rank, local in enumerate(prints):
        for party in parties:
            differs = _differing([prints[party[0]], local])
            if not any(map(all, zip(differs, kinds, strict=True))):
                party.append(rank)
                break
        else:
            parties.append([rank])
    of_hosts = [sorted({hosts[rank] for rank in party}) for party in parties]
    # Processes of one host may differ, too.
    split = sum(map(len, of_hosts)) > len(set(hosts))
    noun, groups = ("process", parties) if split else ("host", of_hosts)
    names = [_format(noun, group) for group in groups[:_MOST_NAMED]]
    if len(groups) > _MOST_NAMED:
        return f"{', '.join(names)} and so on"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _format(noun: str, numbers: Sequence[int]) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{noun if len(numbers) == 1 else plural} {ranges(numbers)}"
