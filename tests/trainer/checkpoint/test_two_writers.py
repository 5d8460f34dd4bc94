"""Two gangs of one job may write at once: the old one, cut off from its operator, and its successor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.trainer.checkpoint.runs import assert_same, author, commit, latest, snapshot
from tests.trainer.checkpoint.stores import MemoryStore, Turns
from tpu_trainer.checkpoint.catalogue import CheckpointTarget, prepare
from tpu_trainer.checkpoint.commit import Author, Folder
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.storage.store import ObjectStore

OLD, NEW = author(attempt=1), author(attempt=2)
OTHER_JOB = author(attempt=7, uid="0123abcd-ffff")

orders = st.lists(st.integers(0, 1), max_size=120)


def writing(by: Author, *steps: int, keep: int = 1) -> Callable[[ObjectStore], None]:
    """Writes checkpoints that only `by` could have written: its attempt is in their tensors."""

    def run(store: ObjectStore) -> None:
        # A cut-off writer may find its files deleted under it: then its checkpoint does not count, and it continues.
        with suppress(StorageError):
            prepare(CheckpointTarget(store, by, keep))
        for step in steps:
            with suppress(StorageError):
                commit(store, step, by, keep, content=content(by, step))

    return run


def content(by: Author, step: int) -> float:
    return 1000.0 * by.attempt + step


def check_newest(store: ObjectStore, expected: Folder) -> None:
    found = latest(store, NEW.fingerprint, lambda _: None)
    assert found.folder == expected
    writer = next(by for by in (OLD, NEW, OTHER_JOB) if (by.job, by.attempt) == (expected.job, expected.attempt))
    assert_same(found.snapshot, snapshot(expected.step, content=content(writer, expected.step)))


@given(order=orders)
def test_an_old_attempt_does_not_harm_its_successor(order: list[int]) -> None:
    store = MemoryStore()
    commit(store, 10, OLD, content=content(OLD, 10))
    Turns(store, order).run([writing(OLD, 20, 30), writing(NEW, 20, 30, 40)])
    check_newest(store, Folder(40, NEW.job, NEW.attempt))


@given(order=orders)
def test_two_jobs_in_one_place_do_not_touch_each_others_checkpoints(order: list[int]) -> None:
    store = MemoryStore()
    Turns(store, order).run([writing(OTHER_JOB, 20, 30), writing(NEW, 20, 25)])
    check_newest(store, Folder(30, OTHER_JOB.job, OTHER_JOB.attempt))
    folders = {name.partition("/")[0] for name in store.list("")}
    assert folders == {str(Folder(30, OTHER_JOB.job, 7)), str(Folder(25, NEW.job, 2))}


@given(order=orders)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_directories_and_buckets_behave_alike(order: list[int], new_store: Callable[[], ObjectStore]) -> None:
    store = new_store()
    Turns(store, order).run([writing(OLD, 20, 30), writing(NEW, 20, 30, 40)])
    check_newest(store, Folder(40, NEW.job, NEW.attempt))


@given(order=orders)
# The old one commits just after the new one has seen its files without a COMMIT.
@example(order=[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1])
def test_the_newest_whole_checkpoint_never_moves_back_while_two_write(order: list[int]) -> None:
    store = MemoryStore()
    commit(store, 10, OLD, content=content(OLD, 10))
    seen: list[int] = []

    def watching(writer: Callable[[ObjectStore], None]) -> Callable[[ObjectStore], None]:
        def run(turned: ObjectStore) -> None:
            writer(Watched(turned))

        return run

    class Watched:
        """Looks, after each operation, at what a third attempt would continue from."""

        def __init__(self, inner: ObjectStore) -> None:
            self.uri, self._inner = inner.uri, inner

        def __getattr__(self, operation: str) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                result = getattr(self._inner, operation)(*arguments)
                seen.append(latest(store, NEW.fingerprint, lambda _: None).commit.examples)
                return result

            return call

    Turns(store, order).run([watching(writing(OLD, 20, 30)), watching(writing(NEW, 20, 30, 40))])
    assert seen == sorted(seen)
