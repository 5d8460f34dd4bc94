"""Several hosts write one checkpoint: what each writes, and that it is whole or absent whoever dies."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import HashStore

from tests.trainer import tasks
from tests.trainer.checkpoint.runs import assert_same, author, commit, latest, snapshot
from tests.trainer.checkpoint.stores import PATIENCE, Intercepted, Killed, MemoryStore, counting, dying_after
from tests.trainer.in_threads import ThreadBackend, in_threads
from tests.trainer.whole_runs import run
from tpu_trainer.checkpoint import parts, together
from tpu_trainer.checkpoint import snapshot as snapshots
from tpu_trainer.checkpoint.catalogue import CheckpointTarget, PeerParts, make_room, prepare, write
from tpu_trainer.checkpoint.checkpointer import Checkpointer, Checkpoints, CheckpointSchedule, PartWriter
from tpu_trainer.checkpoint.commit import COMMIT, Folder
from tpu_trainer.checkpoint.parts import WHOLE, CheckpointPart, Item, describe_layout, divide, file_of
from tpu_trainer.checkpoint.snapshot import LiveState, Snapshot, replicated_tensors
from tpu_trainer.checkpoint.together import Channel, Writers, find_writers, write_part
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.contract.findings import NumericalHealth
from tpu_trainer.data.order import Position
from tpu_trainer.optim import sharding
from tpu_trainer.storage.store import ObjectStore
from tpu_trainer.task.task import Hyperparameters, Task

HOSTS = 3
FILES = ("model", "optimizer", "ema")

sizes = st.dictionaries(st.tuples(st.sampled_from(FILES), st.text(max_size=3)), st.integers(0, 100 << 20), max_size=30)


@given(sizes=sizes, hosts=st.integers(1, 9), seed=st.randoms())
def test_every_tensor_is_in_one_part_and_the_parts_are_nearly_equal(
    sizes: dict[Item, int], hosts: int, seed: Any
) -> None:
    divided_up = divide(sizes, hosts)
    assert sorted(item for part in divided_up for item in part) == sorted(sizes)
    loads = [sum(sizes[item] for item in part) for part in divided_up]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    shuffled = list(sizes.items())
    seed.shuffle(shuffled)
    assert divide(dict(shuffled), hosts) == divided_up


@pytest.mark.parametrize(
    ("megabytes", "hosts", "count"), [(0, 4, 1), (127, 4, 1), (128, 4, 2), (129, 4, 2), (999, 4, 4), (999, 1, 1)]
)
def test_a_checkpoint_has_no_more_parts_than_hosts_and_no_small_ones(megabytes: int, hosts: int, count: int) -> None:
    assert len(divide({("model", str(index)): 1 << 20 for index in range(megabytes)}, hosts)) == count


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (WHOLE, "model.safetensors"),
        (CheckpointPart(0, 2), "model-00001-of-00002.safetensors"),
        (CheckpointPart(63, 64), None),
    ],
)
def test_names_of_parts_read_back_as_their_file(part: CheckpointPart, name: str | None) -> None:
    assert name in (None, part.name("model"))
    assert file_of(part.name("model")) == "model"


@pytest.mark.parametrize("name", ["state.json", "COMMIT", "model-1-of-2.safetensors", "model.safetensors.part"])
def test_other_names_are_no_tensors(name: str) -> None:
    assert file_of(name) is None


def test_buffers_are_not_divided_since_they_differ_from_replica_to_replica() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert {name for _, name in replicated_tensors(LiveState(model, optimizer))} == {
        name for name, _ in model.named_parameters()
    }


def test_hosts_that_order_their_parameters_differently_do_not_agree() -> None:
    tensors = {("optimizer", "/0/m"): torch.zeros(3), ("optimizer", "/1/m"): torch.zeros(3)}
    assert describe_layout(tensors, [["a", "b"]]) != describe_layout(tensors, [["b", "a"]])
    assert describe_layout(tensors, [["a", "b"]]) == describe_layout(dict(reversed(tensors.items())), [["a", "b"]])


class Gang:
    """The hosts of one attempt, each with its own view of the storage; all write the state of `snapshot`."""

    def __init__(self, stores: list[ObjectStore], attempt: int = 1, content: float | None = None) -> None:
        self.said: list[str] = []
        self._stores, self._by, self._content = stores, author(attempt), content
        self._meeting, self.lost = HashStore(), threading.Event()

    def target(self, host: int) -> CheckpointTarget:
        return CheckpointTarget(self._stores[host], self._by, keep=2)

    def channel(self, step: int) -> Channel:
        return Channel(self._meeting, str(step), HOSTS, self.lost)

    def mine(self, host: int, step: int) -> Snapshot:
        """Host 0 writes the model, host 1 the optimizer's state, host 2 an average."""
        whole = snapshot(step, self._content)
        tensors = {**whole.tensors, "ema": {"w": torch.full((5,), float(step))}}
        own = {file: tensors[file] if place == host else {} for place, file in enumerate(FILES)}
        return Snapshot(step, whole.examples, whole.document, whole.trees, own, CheckpointPart(host, HOSTS))

    def lead(self, step: int) -> None:
        write(self.target(0), self.mine(0, step), peer_parts=self.channel(step))
        make_room(self.target(0), step)

    def help(self, host: int, step: int) -> None:
        own = self.mine(host, step)
        folder = Folder(step, self._by.job, self._by.attempt)
        write_part(self.target(host), folder, own.tensors, own.part, self.channel(step), host)

    def write(self, step: int) -> None:
        """By all hosts. One that is killed is missed by the others, as a lost peer is; what host 0 raises is said."""

        def run(work: Callable[[], None]) -> None:
            try:
                work()
            except Killed:
                self.lost.set()
            except StorageError as error:
                self.said.append(str(error))
                self.lost.set()

        work = [lambda: self.lead(step), *(lambda host=host: self.help(host, step) for host in range(1, HOSTS))]
        threads = [threading.Thread(target=run, args=(one,)) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody waits for a lost peer, and a check follows the other at once."""
    monkeypatch.setattr(together, "LAST_SECONDS", 0.0)
    monkeypatch.setattr(together, "_POLL_SECONDS", 0.001)
    return


def newest(store: ObjectStore) -> int | None:
    found = latest(store, author().fingerprint, lambda _: None)
    return None if found is None else found.commit.step


def whole(step: int) -> Snapshot:
    content = snapshot(step)
    average = {"w": torch.full((5,), float(step))}
    return Snapshot(step, content.examples, content.document, content.trees, {**content.tensors, "ema": average})


def test_what_the_hosts_write_together_reads_as_one(store: ObjectStore) -> None:
    Gang([store] * HOSTS).write(10)
    found = latest(store, author().fingerprint, lambda _: None)
    assert_same(found.snapshot, whole(10))
    assert b'"format": 2' in store.read(f"{found.folder}/{COMMIT}")
    assert set(found.commit.files) == {
        "model-00001-of-00003.safetensors",
        "optimizer-00002-of-00003.safetensors",
        "ema-00003-of-00003.safetensors",
        "state.json",
    }


def operations(host: int) -> int:
    store = MemoryStore()
    commit(store, 10)
    commit(store, 20, keep=2)
    views: list[ObjectStore] = [store] * HOSTS
    views[host], done = counting(store)
    Gang(views).write(30)
    return len(done)


@pytest.mark.parametrize("host", range(HOSTS))
def test_whichever_host_is_killed_before_any_of_its_operations_a_whole_checkpoint_is_left(host: int) -> None:
    for survived in range(operations(host)):
        store = MemoryStore()
        commit(store, 10)
        commit(store, 20, keep=2)
        views: list[ObjectStore] = [store] * HOSTS
        views[host] = dying_after(store, survived)
        Gang(views).write(30)
        left = newest(store)
        assert left in ((20,) if host else (20, 30))
        prepare(CheckpointTarget(store, author(attempt=2), keep=2))
        Gang([store] * HOSTS, attempt=2).write(40)
        folders = {name.partition("/")[0] for name in store.list("")}
        assert folders == {str(Folder(left, author().job, 1)), str(Folder(40, author().job, 2))}, survived


def test_the_other_hosts_touch_nothing_before_an_earlier_commit_is_gone() -> None:
    store = MemoryStore()
    Gang([store] * HOSTS, content=1.0).write(10)
    seen: list[bool] = []

    def look(operation: str) -> None:
        seen.append(any(name.endswith(COMMIT) for name in store.objects))

    Gang([store, Intercepted(store, look), Intercepted(store, look)], content=2.0).write(10)
    assert seen
    assert not any(seen)


def full(operation: str) -> None:
    if operation == "put":
        raise StorageError("memory: cannot write: No space left on device")


@pytest.mark.parametrize("host", range(HOSTS))
def test_a_host_that_cannot_write_its_part_leaves_nothing_and_is_named(host: int) -> None:
    store = MemoryStore()
    commit(store, 20)
    before = dict(store.objects)
    views: list[ObjectStore] = [store] * HOSTS
    views[host] = Intercepted(store, full)
    gang = Gang(views)
    gang.write(30)
    named = f"host {host}: " if host else ""
    assert [text.startswith(f"{named}memory: ") for text in gang.said] == [True]
    prepare(CheckpointTarget(store, author(), keep=2))
    assert store.objects == before


def test_hosts_that_share_storage_write_together_and_others_are_named() -> None:
    shared, apart = MemoryStore(), MemoryStore()

    def read_only(operation: str) -> None:
        if operation == "put":
            raise StorageError("Read-only file system")

    table: list[tuple[list[ObjectStore], list[int]]] = [
        ([shared, shared, shared], []),
        ([shared, apart, shared], [1]),
        ([shared, Intercepted(shared, read_only), apart], [1, 2]),
    ]
    for stores, unable in table:
        meeting = HashStore()

        def find(backend: ThreadBackend, stores: list[ObjectStore] = stores, meeting: HashStore = meeting) -> Any:
            backend.store = meeting
            target = CheckpointTarget(stores[backend.rank], author(), keep=1)
            return find_writers(target, backend, HOSTS, backend.rank, leads=backend.rank == 0)

        found = in_threads(HOSTS, find)
        assert [hosts for _, hosts in found] == [unable] * HOSTS
        assert [writers is None for writers, _ in found] == [bool(unable)] * HOSTS
        assert shared.objects == apart.objects == {}


def test_a_host_alone_is_asked_nothing() -> None:
    store, done = counting(MemoryStore())
    (found,) = in_threads(
        1, lambda backend: find_writers(CheckpointTarget(store, author(), 1), backend, 1, 0, leads=True)
    )
    assert (found, done) == ((None, []), [])


def test_one_host_writes_alone_where_the_hosts_do_not_name_tensors_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 8)
    tensors = {("optimizer", f"/{index}/m"): torch.zeros(4) for index in range(6)}

    def counts(orders: list[list[str]]) -> list[int]:
        def divide(backend: ThreadBackend) -> int:
            writers = Writers(backend, HashStore(), HOSTS, backend.rank)
            return len(writers.divide(tensors, [orders[backend.rank]]))

        return in_threads(HOSTS, divide)

    assert counts([["a", "b"]] * HOSTS) == [HOSTS] * HOSTS
    assert counts([["a", "b"], ["b", "a"], ["a", "b"]]) == [1] * HOSTS


def test_a_stop_has_its_checkpoint_once_and_host_0_repeats_alone_what_another_could_not_write() -> None:
    store, meeting = MemoryStore(), HashStore()
    failing = iter([StorageError("memory: no connection")])

    def fail_once(operation: str) -> None:
        if operation == "put" and (error := next(failing, None)):
            raise error

    views: list[ObjectStore] = [store, Intercepted(store, fail_once)]
    due, said, shares = CheckpointSchedule(10, None, 99), [], []

    def run(backend: ThreadBackend) -> int | None:
        writers = Writers(backend, meeting, 2, backend.rank)
        target = CheckpointTarget(views[backend.rank], author(), keep=9)

        channels: dict[int, Channel] = {}

        def divided_again() -> Channel:
            writers.divide({}, [])
            return writers.channel(2)

        def take(step: int, position: Position, health: NumericalHealth, alone: bool) -> Snapshot:
            shares.append(alone)
            held = snapshot(step)
            if alone:
                return held
            channels[step] = divided_again()
            own = {**held.tensors, "optimizer": {}}
            return Snapshot(step, held.examples, held.document, held.trees, own, CheckpointPart(0, 2))

        def take_part(step: int) -> Callable[[], None]:
            channel, own = divided_again(), {"optimizer": snapshot(step).tensors["optimizer"]}
            return lambda: write_part(target, Folder(step, author().job, 1), own, CheckpointPart(1, 2), channel, 1)

        def others(held: Snapshot) -> PeerParts:
            return PeerParts() if held.part == WHOLE else channels[held.step]

        checkpoints: Checkpoints = Checkpointer(target, due, take, said.append, peer_parts=others)
        if backend.rank:
            checkpoints = PartWriter(due, take_part)
        checkpoints.save(10, Position(), NumericalHealth())
        checkpoints.save_now(10, Position(), NumericalHealth())
        return checkpoints.save_now(13, Position(), NumericalHealth())

    assert in_threads(2, run) == [13, None]
    assert ["of step 10 " in text and "host 1: memory:" in text for text in said] == [True]
    assert shares == [False, True, False]
    for step in (10, 13):
        assert f"{Folder(step, author().job, 1)}/{COMMIT}" in store.objects
    assert_same(latest(store, author().fingerprint, lambda _: None).snapshot, snapshot(13))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """What each replica, by its thread, copies from its device for checkpoints, in order."""
    found: dict[int, list[str]] = defaultdict(list)
    copy_to_host = snapshots._to_host

    def noted(tensors: Sequence[Tensor]) -> list[Tensor]:
        found[threading.get_ident()] += [f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors]
        return copy_to_host(tensors)

    monkeypatch.setattr(snapshots, "_to_host", noted)
    return found


@pytest.mark.parametrize("reads_together", [False, True])
@pytest.mark.parametrize(
    ("changes", "written"),
    [
        pytest.param({}, {"model": 2}, id="fewer tensors than hosts"),
        pytest.param({"recipe": {"name": "adamw", "learningRate": "0.1"}}, {"model": 2, "optimizer": 4}, id="adamw"),
        pytest.param(
            {"recipe": {"name": "adamw", "learningRate": "0.1"}, "sharding": "Optimizer"},
            {"model": 2, "optimizer": 4},
            id="divided optimizer",
        ),
    ],
)
def test_the_hosts_of_a_run_write_its_checkpoint_in_parts(
    changes: dict[str, Any],
    written: dict[str, int],
    reads_together: bool,
    read: dict[int, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 8)
    monkeypatch.setattr(sharding, "SMALLEST", 16)
    monkeypatch.setattr(ThreadBackend, "reads_together", reads_together)
    ran = run(linear, 4, trainSteps=2, checkpoint={"uri": str(tmp_path), "keep": 1}, **changes)
    assert ran.outcome.ended_well, ran.outcome.message
    assert ran.warnings == ()
    (folder,) = {path.parent for path in tmp_path.rglob(COMMIT)}
    kept: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path in folder.glob("*-of-00004.safetensors"):
        kept[file_of(path.name)] |= safetensors.torch.load_file(path)
    tensors = {file: sum(tensor.numel() > 1 for tensor in named.values()) for file, named in kept.items()}
    assert tensors == written
    for name, weight in ran.models[0].named_parameters():
        assert torch.equal(kept["model"][name], weight)
    if reads_together:
        first, *others = read.values()
        assert len(first) > 0
        assert others == [first] * 3


def linear(hp: Hyperparameters, rank: int) -> Task:
    return Task(nn.Linear(8, tasks.CLASSES), tasks.examples(), tasks.loss)
