"""Data that a task has divided among its processes is refused at the start; what is the same passes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from tests.trainer import tasks
from tests.trainer.in_threads import in_threads
from tests.trainer.whole_runs import run
from tpu_contract.protocol import ExitCode
from tpu_trainer import Task
from tpu_trainer.contract.errors import UserCodeError
from tpu_trainer.data.same_data import COMPARED, check_order, compare, equal_prints, fingerprint

WORLD = 4


def compared(examples: Callable[[int], Sequence[Any]], hosts: Sequence[int] = range(WORLD)) -> tuple[str | None, str]:
    """What all processes are told: why they are refused, if they are, and a warning. `examples`: reads those of a
    rank."""

    def one(backend: Any) -> str:
        told: list[str] = []
        compare(
            "examples",
            lambda: examples(backend.rank),
            "THE RULE",
            backend,
            hosts[backend.rank],
            lambda finding: told.append(finding.message),
        )
        return "".join(told)

    # Every process decides for itself, by what all have read.
    (answer,) = {
        (str(answer), "") if isinstance(answer, UserCodeError) else (None, answer)
        for answer in in_threads(len(hosts), one, keep=UserCodeError)
    }
    return answer


def refusal(examples: Callable[[int], Sequence[Any]], hosts: Sequence[int] = range(WORLD)) -> str | None:
    return compared(examples, hosts)[0]


def image(rank: int) -> torch.Tensor:
    return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(rank))


SAME: dict[str, Callable[[int], Sequence[Any]]] = {
    "equal examples": lambda rank: [(image(i), i) for i in range(COMPARED)],
    "NaN and infinities": lambda rank: [
        (torch.tensor([float("nan"), float("inf"), -float("inf")]), i) for i in range(4)
    ],
    "reals that were rounded otherwise": lambda rank: [image(i) * (1 + rank * 1e-6) for i in range(COMPARED)],
    "fewer examples than are compared": lambda rank: [(image(0), 1)],
    "no examples": lambda rank: [],
    "files that each host has elsewhere": lambda rank: [(f"/tmp/{rank}/{i}.jpg", i) for i in range(COMPARED)],
    "files in a folder of each process's own": lambda rank: [(f"cache-{rank}/{i}.jpg", i) for i in range(COMPARED)],
    "what cannot be looked into": lambda rank: [object() for _ in range(COMPARED)],
}


@pytest.mark.parametrize("examples", SAME.values(), ids=SAME)
def test_examples_that_are_the_same_as_far_as_can_be_told_pass(examples: Callable[[int], Sequence[Any]]) -> None:
    assert refusal(examples) is None


OTHERS: dict[str, Callable[[int], Sequence[Any]]] = {
    "images": lambda rank: [image(i + 10 * (rank // 2)) for i in range(COMPARED)],
    "images that are sorted by label, and dealt out one by one": lambda rank: [
        (image(4 * i + rank // 2), i) for i in range(4)
    ],
    "labels": lambda rank: [(torch.zeros(3), i + rank // 2) for i in range(COMPARED)],
    "texts": lambda rank: [f"sentence {i + 10 * (rank // 2)}" for i in range(COMPARED)],
    "tokens in mappings": lambda rank: [{"ids": [1, 2, i + rank // 2]} for i in range(COMPARED)],
    "numbers that are large and close": lambda rank: [10**6 + i + rank // 2 for i in range(COMPARED)],
    "bfloat16": lambda rank: [image(i + 10 * (rank // 2)).bfloat16() for i in range(COMPARED)],
    "shapes": lambda rank: [torch.zeros(3 + rank // 2) for i in range(COMPARED)],
    "one example of four": lambda rank: [image(i + 10 * (i == 3) * (rank // 2)) for i in range(COMPARED)],
    "how many there are": lambda rank: [image(i) for i in range(COMPARED - rank // 2)],
}


@pytest.mark.parametrize("examples", OTHERS.values(), ids=OTHERS)
def test_other_examples_are_refused_by_all_and_the_hosts_are_named(examples: Callable[[int], Sequence[Any]]) -> None:
    assert str(refusal(examples)).startswith("hosts 0-1 and hosts 2-3 have different examples: THE RULE")


@pytest.mark.parametrize(
    ("hosts", "who"),
    [
        ([0, 0, 1, 1], "host 0 and host 1"),
        ([0, 1, 0, 1], "processes 0-1 and processes 2-3"),
        ([0, 0, 0, 0], "processes 0-1 and processes 2-3"),
    ],
)
def test_processes_are_named_where_a_host_has_both_kinds(hosts: list[int], who: str) -> None:
    assert str(refusal(OTHERS["images"], hosts)).startswith(f"{who} have different")


def test_a_large_gang_is_named_briefly() -> None:
    text = refusal(lambda rank: [image(100 * rank + i) for i in range(COMPARED)], range(8))
    assert str(text).startswith("host 0 and hosts 1-7 have")


GENERATORS = [np.random.default_rng(rank) for rank in range(WORLD)]
UNCLEAR: dict[str, Callable[[int], Sequence[Any]]] = {
    "an augmentation with a generator of its own": lambda rank: [
        (GENERATORS[rank].random((3, 8, 8)), i) for i in range(COMPARED)
    ],
    "one that leaves most examples alone": lambda rank: [
        float(GENERATORS[rank].random() < 0.3) + i for i in range(COMPARED)
    ],
    "the time": lambda rank: [time.perf_counter_ns() for _ in range(COMPARED)],
}


@pytest.mark.parametrize("examples", UNCLEAR.values(), ids=UNCLEAR)
def test_what_changes_at_every_read_is_a_warning(examples: Callable[[int], Sequence[Any]]) -> None:
    refused, warned = compared(examples)
    assert refused is None
    assert "cannot be compared between the processes: they change at every read" in warned


def test_a_fingerprint_is_a_row_of_numbers_that_float32_holds() -> None:
    for example in (None, b"\xff", [], {}, float("nan"), 10**400, 1e300, np.array([]), torch.zeros(0), "ä\ud800", 1j):
        numbers = fingerprint(example)
        assert torch.isfinite(torch.tensor(numbers)).all()
        assert equal_prints(numbers, torch.tensor(numbers).tolist())


def data(**options: Any) -> Task:
    return Task(model=tasks.Network(), loss=tasks.loss, **{"train": tasks.examples(), **options})


def examples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(tasks.examples())


class Augmented(Dataset[Any]):
    """Draws from torch's, numpy's and Python's generators, which the trainer seeds."""

    def __len__(self) -> int:
        return tasks.EXAMPLES

    def __getitem__(self, index: int) -> Any:
        features, label = tasks.examples()[index]
        return features + torch.randn(8) + np.random.random() + random.random(), label


def test_a_seeded_augmentation_is_the_same_everywhere() -> None:
    ran = run(lambda hp, rank: data(train=Augmented()), 2, trainSteps=2)
    assert (ran.outcome.code, ran.warnings) == (ExitCode.Succeeded, ())


@pytest.mark.parametrize("held_out", [False, True])
def test_a_task_that_shards_its_data_ends_before_the_first_step(held_out: bool) -> None:
    def shard(hp: Any, rank: int) -> Task:
        own = examples()[rank::2]
        metrics = {"evaluation": own, "metrics": lambda model, batch: {"one": batch[1]}}
        return data(**metrics) if held_out else data(train=own)

    ran = run(shard, 2)
    assert ran.outcome.code is ExitCode.UserError
    kind = "evaluation" if held_out else "training"
    assert {outcome.message.partition(":")[0] for outcome in ran.outcomes} == {
        f"host 0 and host 1 have different {kind} examples"
    }
    assert ran.losses == []


class Stream(IterableDataset[Any]):
    """The examples of `rank`, or all of them, but no more than `most`."""

    most = tasks.EXAMPLES

    def __init__(self, rank: int | None = None) -> None:
        self.rank, self.begun = rank, 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        own = examples() if self.rank is None else examples()[self.rank :: 2]
        yield from own[: self.most]


class Stateful(Stream):
    taken = 0

    def state_dict(self) -> Any:
        return {"taken": self.taken}

    def load_state_dict(self, state: Any) -> None:
        self.taken = state["taken"]

    def __iter__(self) -> Iterator[Any]:
        everything = list(super().__iter__())
        while self.taken < len(everything):
            self.taken += 1
            yield everything[self.taken - 1]
        self.taken = 0


@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_a_stream_that_splits_itself_ends_before_the_first_step(kind: type[Stream]) -> None:
    ran = run(lambda hp, rank: data(train=kind(rank)), 2)
    assert ran.outcome.code is ExitCode.UserError
    assert ran.outcome.message.startswith("host 0 and host 1 have")
    assert "split_by_node" in ran.outcome.message
    assert "num_shards and shard(index" in ran.outcome.message
    assert ran.losses == []


def test_a_part_of_a_stream_that_is_too_short_for_a_batch_is_a_part_all_the_same() -> None:
    def part(hp: Any, rank: int) -> Task:
        stream = Stream(rank)
        stream.most = 0 if rank else 72
        return data(train=stream)

    ran = run(part, 2)
    assert {outcome.message.startswith("host 0 and host 1 have ") for outcome in ran.outcomes} == {True}


def test_a_stream_that_is_too_short_everywhere_is_called_so() -> None:
    def short(hp: Any, rank: int) -> Task:
        stream = Stream()
        stream.most = 9
        return data(train=stream)

    for outcome in run(short, 2).outcomes:
        assert outcome.message.startswith("epoch 0 of the task's train")
        assert "9 examples" in outcome.message


READ_TWICE = (
    "the train dataset is one stream; each of the 2 processes reads all of it and uses 1/2: it is read 2 times. With "
    "num_shards and shard(index, count) each process reads its own shards, with workers (docs/data.md)"
)


@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_a_stream_that_all_read_is_a_warning_with_the_number_of_readings(kind: type[Stream]) -> None:
    streams = [kind(), kind()]
    ran = run(lambda hp, rank: data(train=streams[rank]), 2, trainSteps=4)
    assert (ran.outcome.code, ran.warnings) == (ExitCode.Succeeded, (READ_TWICE,))
    assert [stream.begun for stream in streams] == [1, 1]


def test_workers_of_a_stream_are_told_to_be_idle() -> None:
    ran = run(lambda hp, rank: data(train=Stream(), workers=2), trainSteps=2)
    (warning,) = ran.warnings
    assert "task's 2 workers are not used" in warning


def test_shards_that_are_split_by_rank_as_well_are_refused() -> None:
    class Split:
        num_shards = 4

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def shard(self, index: int, count: int) -> Any:
            return examples()[index::count][self.rank :: 2]

    ran = run(lambda hp, rank: data(train=Split(rank)), 2)
    assert ran.outcome.code is ExitCode.UserError
    assert ran.outcome.message.startswith("host 0 and host 1 have")


def test_a_webdataset_is_told_what_to_write() -> None:
    pipeline = type("WebDataset", (Stream,), {"__module__": "webdataset.compat"})
    ran = run(lambda hp, rank: data(train=pipeline()), 2)
    assert ran.outcome.code is ExitCode.UserError
    assert "WebDataset" in ran.outcome.message
    assert run(lambda hp, rank: data(train=pipeline()), 1, trainSteps=2).outcome.code is ExitCode.Succeeded


def ordered(order: Callable[[int], Any]) -> list[Any]:
    made = [data(order=order(rank)) for rank in range(2)]
    return in_threads(2, lambda backend: check_order(made[backend.rank], 3, backend, backend.rank), keep=UserCodeError)


def test_an_order_must_be_the_same_in_every_process_and_whenever_it_is_asked() -> None:
    assert ordered(lambda rank: lambda epoch, seed, size: torch.randperm(size)) == [None, None]
    by_rank = ordered(lambda rank: lambda epoch, seed, size: list(range(rank, size, 2)))
    assert {"host 0 and host 1 have" in str(one) for one in by_rank} == {True}
    counter = itertools.count()
    whims = ordered(lambda rank: lambda epoch, seed, size: [next(counter) % size] * size)
    assert {"order of epoch 0 " in str(one) for one in whims} == {True}


def test_an_order_is_for_data_with_indices() -> None:
    ran = run(lambda hp, rank: data(train=Stream(), order=lambda epoch, seed, size: range(size)))
    assert ran.outcome.message.endswith("has its own order")


def test_an_order_with_replacement_trains_the_same_on_any_number_of_processes() -> None:
    def weighted(epoch: int, seed: int, size: int) -> torch.Tensor:
        return torch.multinomial(torch.arange(1.0, size + 1), 40, replacement=True)

    one, four = (run(lambda hp, rank: data(order=weighted), world, trainSteps=6) for world in (1, 4))
    assert four.losses == pytest.approx(one.losses, abs=1e-5)
    assert one.losses != run(lambda hp, rank: data(), trainSteps=6).losses
