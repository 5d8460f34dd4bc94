"""A checkpoint is whole or it does not count, wherever its writer is killed and whatever happens to its files."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.trainer.checkpoint.lives import DAMAGE, Damage
from tests.trainer.checkpoint.runs import assert_same, author, commit, latest, snapshot
from tests.trainer.checkpoint.stores import Killed, MemoryStore, counting, dying_after
from tpu_trainer.checkpoint.catalogue import CheckpointTarget, LoadedCheckpoint, prepare, write
from tpu_trainer.checkpoint.commit import COMMIT, Folder
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.storage.store import ObjectStore


def newest(store: ObjectStore) -> LoadedCheckpoint | None:
    return latest(store, author().fingerprint, lambda _: None)


def third_checkpoint(store: ObjectStore) -> None:
    """Its writer keeps two, so that all three matter while it works."""
    commit(store, 30, keep=2)


def operations_of_the_third() -> list[str]:
    store = MemoryStore()
    commit(store, 10)
    commit(store, 20)
    counted, done = counting(store)
    third_checkpoint(counted)
    return done


@pytest.mark.parametrize("operations", range(len(operations_of_the_third()) + 1))
def test_a_writer_killed_before_any_of_its_operations_leaves_a_whole_checkpoint_and_the_next_attempt_cleans_up(
    operations: int, store: ObjectStore
) -> None:
    commit(store, 10)
    commit(store, 20)
    with suppress(Killed):
        third_checkpoint(dying_after(store, operations))
    step = 30 if "put_if_absent" in operations_of_the_third()[:operations] else 20
    assert_same(newest(store).snapshot, snapshot(step))
    successor = author(attempt=2)
    prepare(CheckpointTarget(store, successor, keep=2))
    assert newest(store).commit.step == step
    commit(store, 40, successor, keep=2)
    assert {name.partition("/")[0] for name in store.list("")} == {
        str(Folder(step, successor.job, 1)),
        str(Folder(40, successor.job, 2)),
    }


def test_a_writer_killed_while_it_replaces_its_own_checkpoint_leaves_no_mixture(store: ObjectStore) -> None:
    commit(store, 10)
    commit(store, 20, content=1.0)
    counted, done = counting(store)
    commit(counted, 20, content=2.0)
    for operations in range(done.index("put_if_absent") + 1):
        commit(store, 20, content=1.0)
        with suppress(Killed):
            commit(dying_after(store, operations), 20, content=2.0)
        assert_same(newest(store).snapshot, snapshot(10) if operations else snapshot(20, content=1.0))


def two_checkpoints() -> MemoryStore:
    store = MemoryStore()
    commit(store, 10)
    commit(store, 20)
    return store


FILES = sorted(name for name in two_checkpoints().objects if name.startswith("step-00000020"))


@given(name=st.sampled_from(FILES), share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_off_anywhere_rules_its_checkpoint_out(name: str, share: float) -> None:
    store = two_checkpoints()
    store.objects[name] = store.objects[name][: int(share * len(store.objects[name]))]
    assert_same(newest(store).snapshot, snapshot(10))


@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_read_as_data(name: str, place: float, bit: int) -> None:
    store = two_checkpoints()
    data = bytearray(store.objects[name])
    data[int(place * len(data))] ^= 1 << bit
    store.objects[name] = bytes(data)
    # In COMMIT a flipped bit may hit what decides nothing, as a space between its fields.
    assume(not name.endswith(COMMIT))
    assert_same(newest(store).snapshot, snapshot(10))


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_a_commit_rules_the_checkpoint_out_or_changes_none_of_its_data(place: float, bit: int) -> None:
    store = two_checkpoints()
    name = next(name for name in FILES if name.endswith(COMMIT))
    data = bytearray(store.objects[name])
    data[int(place * len(data))] ^= 1 << bit
    store.objects[name] = bytes(data)
    found = newest(store).snapshot
    assert_same(found, snapshot(found.step))


def without_commit(store: ObjectStore, name: str) -> None:
    store.delete(f"{name}/{COMMIT}")


def renamed(store: ObjectStore, name: str) -> None:
    for path in store.list(name):
        store.put(path.replace("00000020", "00000021"), store.read(path))
        store.delete(path)


PASSED_OVER = {
    "without COMMIT": (without_commit, "it has no COMMIT"),
    "renamed": (renamed, "its COMMIT is of step 20"),
    **{
        damage: (DAMAGE[damage], said)
        for damage, said in {
            "a short COMMIT": "its COMMIT is cut off",
            "a newer format": "its COMMIT is of format 3",
            "a short file of weights": "its model.safetensors has ",
            "a missing file of weights": "its model.safetensors is miss",
            "a flipped bit": "its optimizer.safetensors is not",
        }.items()
    },
}


@pytest.mark.parametrize(("damage", "said"), PASSED_OVER.values(), ids=PASSED_OVER)
def test_a_checkpoint_that_is_passed_over_is_one_line_in_the_log(damage: Damage, said: str) -> None:
    store = two_checkpoints()
    damage(store, "step-00000020-5f0c1234-1")
    lines: list[str] = []
    assert latest(store, author().fingerprint, lines.append).commit.step == 10
    # What is missing may come back, which has a line of its own.
    (line,) = [line for line in lines if not line.startswith("looks at the checkpoints in memory again")]
    assert line.startswith("checkpoint step-0000002")
    assert f"-5f0c1234-1 is passed over: {said}" in line


def test_a_writer_that_finds_another_writers_commit_does_not_claim_it(store: ObjectStore) -> None:
    commit(store, 10)
    mine, rival = CheckpointTarget(store, author(), 2), MemoryStore()
    commit(rival, 20, content=7.0)

    class Overtaken:
        """The other one commits just before."""

        uri = store.uri
        list, read, put, delete = store.list, store.read, store.put, store.delete

        def put_if_absent(self, name: str, data: bytes) -> bool:
            store.put(name, rival.objects[name])
            return store.put_if_absent(name, data)

    with pytest.raises(StorageError, match="step-00000020-5f0c1234-1"):
        write(CheckpointTarget(Overtaken(), mine.author, 2), snapshot(20))
    assert newest(store).commit.step == 10


def test_a_commit_whose_answer_was_lost_and_that_was_sent_again_counts() -> None:
    class AnswersLate(MemoryStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            super().put_if_absent(name, data)
            return super().put_if_absent(name, bytes(data[:1]) + data[1:])

    store = AnswersLate()
    write(CheckpointTarget(store, author(), 2), snapshot(20))
    assert_same(newest(store).snapshot, snapshot(20))


@pytest.mark.parametrize("puts", range(3))
def test_a_refused_write_frees_the_room_it_took(puts: int) -> None:
    left = iter(range(puts))

    class Full(MemoryStore):
        def put(self, name: str, data: bytes) -> None:
            if next(left, None) is None:
                raise StorageError("memory: cannot write: No space left on device")
            super().put(name, data)

    store = Full()
    with pytest.raises(StorageError, match="No space left on device"):
        write(CheckpointTarget(store, author(), 2), snapshot(20))
    assert store.objects == {}
