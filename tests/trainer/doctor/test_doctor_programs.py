"""The comparison of programs: real stores and one thread per replica; only the hash is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from syrupy.assertion import SnapshotAssertion
from torch.distributed import Store, TCPStore

from tpu_contract.protocol import Phase
from tpu_trainer.contract.clock import Clock
from tpu_trainer.contract.errors import DivergedError, PeerLostError
from tpu_trainer.doctor.agreement import Programs


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def replica(server: TCPStore, rank: int, world: int, programs: list[str], seconds: float = 60.0) -> Programs:
    """A replica whose n-th comparison is about `programs[n]`."""
    remaining = iter(programs)
    store = server if rank == 0 else TCPStore("127.0.0.1", server.port, is_master=False)
    backend = SimpleNamespace(rank=rank, world=world, store=store, graph_hash=lambda tensors: next(remaining))
    return Programs(backend, Clock(), seconds)


def compare(gang: Sequence[Programs], step: int) -> list[Exception | None]:
    """What became of each replica's comparison."""
    return all_at_once([lambda one=one: one.compare(step, []) for one in gang])


def all_at_once(calls: list[Callable[[], None]]) -> list[Exception | None]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.exception() for future in [threads.submit(call) for call in calls]]


def test_replicas_with_equal_programs_continue(server: TCPStore) -> None:
    gang = [replica(server, rank, 4, ["a", "b", "a"]) for rank in range(4)]
    for step in (1, 2, 3):
        assert compare(gang, step) == [None] * 4


def test_one_different_program_ends_every_replica_with_the_same_message(server: TCPStore) -> None:
    gang = [replica(server, rank, 4, ["a", "x" if rank == 2 else "b"]) for rank in range(4)]
    compare(gang, 1)
    errors = compare(gang, 2)
    assert {type(error) for error in errors} == {DivergedError}
    (text,) = {str(error) for error in errors}
    # The process that serves the store may end now: all the others have what they need of it.
    assert server.check(["program/1/all-read"])
    assert text.startswith("in step 2 replica 2 would run")


def test_a_replica_that_is_late_counts_as_lost_not_divergent(
    server: TCPStore, capfd: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    gang = [replica(server, rank, 3, ["a"], seconds=0.2) for rank in range(2)]
    errors = compare(gang, 1)
    assert {type(error) for error in errors} == {PeerLostError}
    (text,) = {str(error) for error in errors}
    assert "step 1" in text
    assert "replica 2" in text
    assert "0.2 s" in text
    assert text == snapshot
    capfd.readouterr()  # what the store itself says of the time-out


def test_nobody_waits_for_a_replica_that_has_failed(server: TCPStore) -> None:
    gang = [replica(server, rank, 3, ["a", "b"]) for rank in range(3)]
    compare(gang, 1)
    *waiting, failing = gang
    errors = all_at_once([*(lambda one=one: one.compare(2, []) for one in waiting), failing.leave])
    assert [str(error).startswith("step 2: replica 2 failed ") for error in errors[:2]] == [True] * 2
    assert {type(error) for error in errors[:2]} == {PeerLostError}


def test_a_store_that_is_gone_is_a_lost_peer(
    server: TCPStore, capfd: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def fail(*args: object) -> None:
                raise RuntimeError("Connection reset by peer\n<native stack>")

            return fail

    backend = SimpleNamespace(rank=1, world=2, store=Gone(), graph_hash=lambda tensors: "a")
    programs = Programs(backend, Clock())
    with pytest.raises(PeerLostError) as caught:
        programs.compare(3, [])
    assert "step 3" in str(caught.value)
    assert str(caught.value) == snapshot
    programs.leave()


def test_one_process_alone_and_a_backend_that_traces_nothing_compare_nothing() -> None:
    Programs(SimpleNamespace(store=None), Clock()).compare(1, [])
    traceless = SimpleNamespace(store=SimpleNamespace(), graph_hash=lambda tensors: None)
    Programs(traceless, Clock()).compare(1, [])


def test_waiting_for_the_others_is_not_the_hosts_own_work(server: TCPStore) -> None:
    phases: list[Phase] = []
    gang = [replica(server, rank, 2, ["a"]) for rank in range(2)]
    clock = gang[0]._clock
    clock.enter(Phase.HOST)
    store: Store = gang[0]._backend.store
    watched = SimpleNamespace(
        set=store.set,
        add=store.add,
        get=store.get,
        delete_key=store.delete_key,
        wait=lambda *args: (phases.append(clock.current()[0]), store.wait(*args)),
    )
    gang[0]._backend.store = watched
    assert compare(gang, 1) == [None, None]
    assert phases == [Phase.DEVICE]
    assert clock.current()[0] is Phase.HOST


def test_comparisons_leave_no_hashes_in_the_store(server: TCPStore) -> None:
    gang = [replica(server, rank, 2, ["a"] * 10) for rank in range(2)]
    for _ in range(10):
        compare(gang, 1)
    assert not any(server.check([f"program/{index}/{rank}"]) for index in range(10) for rank in range(2))
