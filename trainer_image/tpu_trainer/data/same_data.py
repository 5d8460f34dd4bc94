"""Refuses data that the task has divided among the processes itself.

The trainer takes each process's part of an order of the whole dataset. If a process sees only a part of the data, that
part is divided once more: some examples are never used and others twice, and nothing else reveals it. So before the
first step the processes compare the lengths of their data and a few examples.

Examples that differ are read again. If they then differ within a process, too, random numbers that the trainer does not
seed have changed them: nothing can be compared, and the run continues with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.contract.findings import Finding, ranges
from tpu_trainer.data.loading import (
    NO_WORKERS,
    Workers,
    evaluation_workers,
    has_length,
    held_out,
    is_sharded,
    length_of,
    name_held_out,
    training_workers,
)
from tpu_trainer.data.order import GENERATORS, epoch_order, keep_generators, seed_generators
from tpu_trainer.data.shards import forget_worker, open_shard
from tpu_trainer.gang.backends.base import Backend
from tpu_trainer.gang.gather import checksum, gather_whole
from tpu_trainer.task.task import Task

COMPARED = 4
"""Examples of each dataset that are compared."""

_WIDTH = 3
"""Numbers in an example's fingerprint: a checksum of its exact content, a weighted sum of its reals, and their norm."""

_TOLERANCE = 1e-3
"""Reals count as equal up to this part of their norm: hosts with different CPUs round differently."""

_MOST_REALS = 2**16
_DEEPEST = 8

WHOLE = "every process must see the whole dataset; the trainer shards it"

STREAM = (
    "every process must read the same stream. Do not split it by rank or host (split_by_node, split_dataset_by_node): "
    "give it num_shards and shard(index, count), and each process reads its own shards (docs/data.md). Random numbers "
    "come from torch's, numpy's or Python's own generator, which the trainer seeds"
)

SHARD = (
    "shard(index, count) must give the same examples in every process, and the trainer deals out the shards. Do not "
    "split the data by rank or host as well (split_by_node, split_dataset_by_node)"
)

Read = Callable[[], Sequence[Any]]
"""Reads the examples that are compared."""


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
    hosts, *columns = zip(*gather_whole([host, *sizes.values()], backend), strict=True)
    for kind, lengths in zip(sizes, columns, strict=True):
        if parties := _name_parties(hosts, [length != lengths[0] for length in lengths]):
            others = {length for length in lengths if length != lengths[0]}
            span = "-".join(map(str, sorted({min(others), max(others)})))
            raise UserCodeError(
                f"the {kind} data has {lengths[0]} examples for {parties[0]} and {span} for {parties[1]}: {WHOLE}"
            )


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
    checksums = [checksum(epoch_order(size, seed, epoch, task.order).tobytes()) for epoch in (0, 1, 0)]
    rows = backend.gather([host, *checksums])
    if any(row[1] != row[3] for row in rows):
        raise UserCodeError(
            "the task's order of epoch 0 changes with every call, so a resumed run could not continue with it. Draw "
            "from torch's, numpy's or Python's own generator, which are seeded for every epoch, or from a generator "
            "that is made from epoch and seed"
        )
    if parties := _name_parties([int(row[0]) for row in rows], [row[1:] != rows[0][1:] for row in rows]):
        raise UserCodeError(
            f"{' and '.join(parties)} have different orders of the training data: the task's order must not depend on "
            "the rank or the host. It is the order of the job, of which the trainer takes each process's part"
        )


def check_examples(task: Task, seed: int, backend: Backend, host: int, tell: Callable[[Finding], None]) -> None:
    """Compares a few examples of each map-style dataset, and of a sharded stream's first shard. A collective; not for
    other streams, whose first batch `compare` gets as it is read. `tell`: gets a warning of examples that change.

    Raises:
        UserCodeError: in every process, if they differ; or the dataset raised.
    """
    if backend.world == 1:
        return
    workers = training_workers(task)
    if has_length(task.train):
        compare("training examples", _spread(task.train, seed), WHOLE, backend, host, tell, workers)
    elif is_sharded(task.train):
        compare("examples in training shard 0", _first_of_shard(task.train, seed), SHARD, backend, host, tell, workers)
    for name, dataset in held_out(task).items():
        kind, workers = f"{name_held_out(name)} examples", evaluation_workers(task, dataset)
        compare(kind, _spread(dataset, seed), WHOLE, backend, host, tell, workers)


def compare(
    kind: str,
    read: Read,
    rule: str,
    backend: Backend,
    host: int,
    tell: Callable[[Finding], None],
    workers: Workers = NO_WORKERS,
) -> None:
    """Compares the first examples that `read` returns in all processes. A collective.

    kind: the name of the examples. rule: what would be right. tell: gets a warning of examples that change at every
    read. workers: the task's workers for them.

    Raises:
        UserCodeError: in every process, if they differ for another reason; or `read` raised.
    """
    with user_code(f"reading {kind}"):
        local = _read_prints(read, workers)
    missing = [[-1.0, 0.0, 0.0]] * (COMPARED - len(local))
    rows = backend.gather([host, *(number for example in [*local, *missing] for number in example)])
    prints = [[row[at : at + _WIDTH] for at in range(1, len(row), _WIDTH)] for row in rows]
    differs = [not all(map(equal_prints, prints[0], others)) for others in prints]
    parties = _name_parties([int(row[0]) for row in rows], differs)
    if parties is None:
        return
    with user_code(f"reading {kind}"):
        changes = not all(map(equal_prints, local, _read_prints(read, workers)))
    if not any(row[0] for row in backend.gather([float(changes)])):
        raise UserCodeError(f"{' and '.join(parties)} have different {kind}: {rule}")
    text = (
        f"the {kind} cannot be compared between the processes: they change at every read, by random numbers that the "
        "trainer does not seed. Draw them from torch's, numpy's or Python's own generator; until then nothing shows "
        f"whether {rule}"
    )
    tell(Finding("Data", 0, text))


def _name_parties(hosts: Sequence[int], differs: Sequence[bool]) -> tuple[str, str] | None:
    """Names those that are like the first process, and those that differ from it; None if none does. hosts: the host of
    every process."""
    ranks = [[rank for rank, other in enumerate(differs) if other is wanted] for wanted in (False, True)]
    if not ranks[1]:
        return None
    same, others = ({hosts[rank] for rank in group} for group in ranks)
    # Processes of one host may differ, too.
    if same & others:
        return _format("process", ranks[0]), _format("process", ranks[1])
    return _format("host", sorted(same)), _format("host", sorted(others))


def _format(noun: str, numbers: Sequence[int]) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{noun if len(numbers) == 1 else plural} {ranges(numbers)}"


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


def _read_prints(read: Read, workers: Workers) -> list[list[float]]:
    """Returns the fingerprints of the examples. With `workers`, a worker reads: a file that the dataset opens at the
    first read must not be open in this process, or the training's workers would share its offset."""
    if not workers.count:
        with GENERATORS, keep_generators():
            return [fingerprint(example) for example in read()]
    loader: DataLoader[Any] = DataLoader(
        _Prints(read),
        batch_size=None,
        collate_fn=list,
        num_workers=1,
        worker_init_fn=workers.begin,
        generator=torch.Generator(),
    )
    return list(loader)


class _Prints(IterableDataset[Any]):
    """The examples' fingerprints, as a dataset that a worker reads."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        forget_worker()
        return map(fingerprint, self._read())


def fingerprint(example: Any) -> list[float]:
    """Returns `_WIDTH` finite numbers for float32, by which processes find out whether they have the same example."""
    reals: list[npt.NDArray[np.float64]] = []
    content = checksum(b"|".join(_exact_parts(example, reals, 0)))
    # Bounded, because squares follow; NaN is an ordinary value here.
    row = np.clip(np.nan_to_num(np.concatenate([np.zeros(1), *reals]), nan=-1.25), -1e15, 1e15)
    # Any weights that differ from each other will do.
    weights = np.cos(1.7 * np.arange(len(row)))
    return [content, float(weights @ row), math.sqrt(float(row @ row))]


def equal_prints(left: Sequence[float], right: Sequence[float]) -> bool:
    return left[0] == right[0] and abs(left[1] - right[1]) <= _TOLERANCE * max(left[2], right[2])


def _exact_parts(value: Any, reals: list[npt.NDArray[np.float64]], depth: int) -> Iterator[bytes]:
    """Yields the content that must be the same to the bit. What may be rounded goes to `reals`."""
    if isinstance(value, Tensor):
        value = _as_array(value)
    elif isinstance(value, bool | int | float | complex) or hasattr(value, "__array_interface__"):
        # For example a PIL image.
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        yield f"{value.dtype.kind}{value.shape}".encode()
        if value.dtype.kind in "fc":
            reals.append(_real(value))
        elif not value.dtype.hasobject:
            yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, str):
        # A path may be another one on each host; the file's name counts.
        name = value if " " in value else value.rpartition("/")[2]
        yield name.encode(errors="replace")
    elif isinstance(value, bytes | bytearray):
        yield bytes(value)
    elif depth < _DEEPEST:
        for part in _parts(value):
            yield from _exact_parts(part, reals, depth + 1)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif hasattr(value, "__dict__"):
        yield from vars(value).values()


def _as_array(tensor: Tensor) -> npt.NDArray[Any]:
    plain = tensor.detach().to("cpu")
    if plain.layout != torch.strided or plain.is_quantized:
        plain = plain.to_dense() if not plain.is_quantized else plain.dequantize()
    if plain.is_floating_point():
        plain = plain.to(torch.float64)
    array: npt.NDArray[Any] = plain.resolve_conj().resolve_neg().numpy()
    return array


def _real(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    flat = array.ravel()
    flat = flat[:: max(1, len(flat) // _MOST_REALS)]
    if flat.dtype.kind == "c":
        flat = np.stack([flat.real, flat.imag], axis=-1).ravel()
    return flat.astype(np.float64)
