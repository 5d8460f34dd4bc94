"""The small pieces under the loop, in one process: feeding, placement, flat tensors, throughput."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.trainer import tasks
from tpu_trainer.gang.backends.base import fill_from, flatten, in_groups, map_tensors, move_model, unflatten
from tpu_trainer.gang.backends.feed import feed_ahead, feed_in_turn
from tpu_trainer.reporting.throughput import Throughput


def test_unflatten_is_the_inverse_of_flatten() -> None:
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(7.0), torch.tensor([8.0, 9.0])]
    flat = flatten(tensors)
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0, 9.0]
    assert all(torch.equal(a, b) for a, b in zip(unflatten(flat, tensors), tensors, strict=True))


def test_throughput_leaves_out_the_steps_that_compile() -> None:
    throughput = Throughput(global_batch=32)
    for step, now in [(1, 60.0), (2, 90.0), (3, 91.0)]:
        throughput.arrived(step, now)
        assert throughput.rate is None
    throughput.arrived(13, 96.0)
    assert throughput.rate == 10 * 32 / 5.0


def numbered(numbers: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Batches, each with something that stays on the host."""
    return ((number, f"the {number}th") for number in numbers)


def failing_after(good: int) -> Iterator[tuple[int, str]]:
    yield from numbered(range(good))
    raise ValueError("the shard is broken")


@pytest.mark.parametrize("feed", [feed_ahead, feed_in_turn])
def test_batches_arrive_in_order_and_an_error_in_its_place(feed: Callable[..., Any]) -> None:
    with feed(failing_after(9), lambda batch: batch * 10) as batches:
        assert [next(batches) for _ in range(9)] == [(number * 10, f"the {number}th") for number in range(9)]
        with pytest.raises(ValueError, match="the shard is broken"):
            next(batches)


@pytest.mark.parametrize("feed", [feed_ahead, feed_in_turn])
def test_a_feed_ends_with_its_batches(feed: Callable[..., Any]) -> None:
    with feed(numbered(range(9)), lambda batch: batch) as batches:
        assert list(batches) == list(numbered(range(9)))


def test_a_feed_that_is_left_early_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with feed_ahead(numbered(itertools.count()), lambda batch: batch) as batches:
        assert next(batches) == (0, "the 0th")
    assert threading.active_count() == before


def test_a_feed_says_that_the_next_batch_is_late_before_it_waits_for_it() -> None:
    late = threading.Event()

    def waiting() -> Iterator[tuple[int, str]]:
        assert late.wait(60), "the feed has said nothing"
        yield from numbered([7])

    with feed_ahead(waiting(), lambda batch: batch, late.set) as batches:
        assert next(batches) == (7, "the 7th")


def test_a_feed_says_nothing_of_a_batch_that_is_ready() -> None:
    said: list[str] = []
    second = threading.Event()

    def place(batch: int) -> int:
        # The first is ready when the second is placed.
        if batch == 1:
            second.set()
        return batch

    with feed_ahead(numbered(itertools.count()), place, lambda: said.append("late")) as batches:
        assert second.wait(60)
        next(batches)
    assert said == []


Pair = namedtuple("Pair", "x y")


def test_a_batch_keeps_its_structure_on_the_device() -> None:
    one = torch.zeros(1)
    moved = map_tensors(lambda tensor: tensor.to("meta"), {"a": [one, (one, "text")], "b": Pair(one, 3)})
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == moved["b"].x.device.type == "meta"
    assert (moved["a"][1][1], moved["b"].y, type(moved["b"])) == ("text", 3, Pair)


@dataclass(frozen=True)
class Sentences:
    """Its constructor takes other arguments than its fields."""

    tokens: torch.Tensor = field(init=False)
    language: str = "en"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", torch.zeros(2))


class Encoding(UserDict[str, Any]):
    """As a tokenizer's: keys are attributes, too, and it has more than its items."""

    def __init__(self, data: dict[str, Any], padded: bool) -> None:
        super().__init__(data)
        self.padded = padded

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self).get("data", {}):
            raise AttributeError(name)
        return self.data[name]


class Boxes:
    """An object of the user's that can be moved."""

    def __init__(self) -> None:
        self.corners, self.label = torch.zeros(4), "car"

    def to(self, device: Any) -> Boxes:
        raise AssertionError("the backend moves the tensors in its own way")


class Graph:
    """As in PyTorch Geometric: tensors in a store, and a method that applies a function to each."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self._store = {"nodes": nodes}

    nodes = property(lambda self: self._store["nodes"])

    def to(self, device: Any) -> Graph:
        raise AssertionError("the backend moves the tensors in its own way")

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Graph:
        return Graph(function(self.nodes))


@pytest.mark.parametrize(
    ("batch", "tensor", "rest"),
    [
        (Sentences(), lambda batch: batch.tokens, lambda batch: batch.language == "en"),
        (Encoding({"ids": torch.zeros(2)}, True), lambda batch: batch.ids, lambda batch: batch.padded),
        (OrderedDict(b=torch.zeros(2), a=1), lambda batch: batch["b"], lambda batch: list(batch) == ["b", "a"]),
        (MappingProxyType({"x": torch.zeros(2)}), lambda batch: batch["x"], None),
        (Boxes(), lambda batch: batch.corners, lambda batch: batch.label == "car"),
        (Graph(torch.zeros(2)), lambda batch: batch.nodes, None),
    ],
)
def test_a_batch_object_keeps_its_type_and_its_tensors_are_moved(
    batch: Any, tensor: Callable[[Any], torch.Tensor], rest: Callable[[Any], bool] | None
) -> None:
    moved = map_tensors(lambda one: one.to("meta"), batch)
    assert tensor(moved).device.type == "meta"
    assert tensor(batch).device.type == "cpu"
    if rest is not None:
        assert type(moved) is type(batch)
        assert rest(moved)


@pytest.mark.parametrize("source", [0, 1])
def test_a_broadcast_made_of_sums_gives_one_ranks_values_bit_for_bit(source: int) -> None:
    mask = torch.tensor([0.0, -0.0, float("-inf")])
    theirs = [mask, torch.tensor([True, False]), torch.tensor(7), torch.tensor([1.5], dtype=torch.bfloat16)]
    mine = [torch.full_like(tensor, 1) for tensor in theirs]
    sent: list[torch.Tensor] = []
    fill_from(source, theirs, torch.tensor(source), lambda tensors: sent.extend(tensors) or tensors)
    rank = torch.tensor(1 - source)
    fill_from(source, mine, rank, lambda tensors: [a + b for a, b in zip(tensors, sent, strict=True)])
    for received, original in zip(mine, theirs, strict=True):
        assert torch.equal(received, original)
    assert torch.equal(theirs[0], mask)
    assert torch.equal(mine[0].signbit(), mask.signbit())


@pytest.mark.parametrize(
    ("sizes", "groups"), [([], []), ([8], [[8]]), ([1, 1, 1], [[1, 1], [1]]), ([1, 4, 1, 1], [[1], [4], [1, 1]])]
)
def test_tensors_are_sent_in_groups_of_a_limited_size(sizes: list[int], groups: list[list[int]]) -> None:
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    assert [[tensor.numel() for tensor in group] for group in in_groups(tensors, limit=2)] == groups


def test_moving_a_model_keeps_shared_weights_shared() -> None:
    model = tasks.Network()
    move_model(model, torch.device("meta"))
    assert model.first.weight is model.second.weight
    assert model.head.weight.device.type == "meta"
