"""What a replica shows, for any order of watch events, answers to own requests and lists.

The API server here counts every change. Answers arrive whenever hypothesis wants, also long after the watch has told
more. Once the watch has caught up, the replica is what the API server has; and no uid that was deleted comes back.
"""

import os

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tpu_training_operator.kube.replica import Change, Name, Replica, Version

SOAK = os.environ.get("SOAK") == "1"
A = ("team", "a")
NAMES = (A, ("team", "b"), ("other", "a"))
ANY = st.sampled_from(NAMES)


class OneKind(RuleBasedStateMachine):
    """`stored`: by name, the present version. `journal`: every change, and whether it was a deletion. `answers`: on
    their way to this process, as are the `pages` of a list and its version."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.stored: dict[Name, Version[str]] = {}
        self.journal: list[tuple[bool, Version[str]]] = []
        self.heard = 0
        self.answers: list[Version[str]] = []
        self.pages: list[list[Version[str]]] = []
        self.listed_as_of = 0
        self.replica: Replica[str] = Replica()
        self.known_to_be_gone: set[str] = set()

    # What happens in the cluster.

    def store(self, name: Name, uid: str, kept: str) -> Version[str]:
        self.number += 1
        self.stored[name] = stored = Version(name, uid, self.number, kept)
        self.journal.append((False, stored))
        return stored

    @rule(name=ANY, is_ours=st.booleans())
    def an_object_is_created_or_changed(self, name: Name, is_ours: bool) -> None:
        old = self.stored.get(name)
        uid = f"uid-{self.number}" if old is None else old.uid
        stored = self.store(name, uid, f"state {self.number}")
        if is_ours:
            self.answers.append(stored)

    @rule(name=ANY)
    def a_change_that_nobody_sees(self, name: Name) -> None:
        if name in self.stored:
            self.store(name, self.stored[name].uid, self.stored[name].record or "")

    @rule(name=ANY)
    def an_object_is_deleted(self, name: Name) -> None:
        if old := self.stored.pop(name, None):
            self.number += 1
            self.journal.append((True, Version(name, old.uid, self.number, old.record)))

    # What this process hears.

    @rule(which=st.integers(0, 20))
    @precondition(lambda self: self.answers)
    def an_answer_arrives(self, which: int) -> None:
        self.replica.apply_answer(self.answers.pop(which % len(self.answers)))

    @rule(name=ANY)
    def a_read_finds_what_there_is(self, name: Name) -> None:
        uid = self.replica.uid(name)
        if name in self.stored:
            self.replica.apply_answer(self.stored[name])
        elif uid is not None:
            self.replica.mark_gone(name, uid)
            self.known_to_be_gone.add(uid)

    @rule(events=st.integers(1, 4))
    @precondition(lambda self: not self.pages)
    def the_watch_tells(self, events: int) -> None:
        for is_gone, told in self.journal[self.heard : self.heard + events]:
            (self.replica.apply_deletion if is_gone else self.replica.apply_change)(told)
            if is_gone:
                self.known_to_be_gone.add(told.uid)
        self.heard = min(len(self.journal), self.heard + events)

    @rule(page=st.integers(1, 3))
    @precondition(lambda self: not self.pages)
    def a_list_begins(self, page: int) -> None:
        everything = list(self.stored.values())
        self.pages = [everything[start : start + page] for start in range(0, len(everything), page)] or [[]]
        self.heard, self.listed_as_of = len(self.journal), self.number
        self.replica.begin_list(self.number)

    @rule()
    @precondition(lambda self: self.pages)
    def a_page_arrives(self) -> None:
        for listed in self.pages.pop(0):
            self.replica.add_listed(listed)
        if not self.pages:
            self.replica.end_list(self.listed_as_of)

    # What must hold.

    @invariant()
    def nothing_that_is_known_to_be_gone_is_shown(self) -> None:
        shown = {name for name, _ in self.replica.items()}
        assert not {self.replica.uid(name) for name in shown} & self.known_to_be_gone
        assert {name for name in NAMES if self.replica.get(name) is not None} == shown
        assert {name for name in NAMES if self.replica.uid(name) is not None} == shown

    @invariant()
    def what_was_told_is_known(self) -> None:
        for name, stored in self.stored.items():
            if stored.number <= self.replica.known_until and not self.pages:
                assert self.replica.get(name) == stored.record

    def teardown(self) -> None:
        while self.pages:
            self.a_page_arrives()
        self.the_watch_tells(len(self.journal))
        while self.answers:
            self.replica.apply_answer(self.answers.pop())
        assert dict(self.replica.items()) == {name: stored.record for name, stored in self.stored.items()}


class OneKindStreamed(OneKind):
    """A stream keeps the changes of one object in order, not those of several, and goes on beside lists."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[str, list[tuple[bool, Version[str]]]] = {}

    @rule(events=st.integers(1, 4), which=st.integers(0, 20))
    def the_watch_tells(self, events: int, which: int = 0) -> None:
        for change in self.journal[self.heard :]:
            self.streams.setdefault(change[1].uid, []).append(change)
        self.heard = len(self.journal)
        waiting = [stream for stream in self.streams.values() if stream]
        for _ in range(min(events, len(waiting))):
            if stream := waiting[which % len(waiting)]:
                is_gone, told = stream.pop(0)
                (self.replica.apply_streamed_deletion if is_gone else self.replica.apply_streamed_change)(told)
                if is_gone:
                    self.known_to_be_gone.add(told.uid)

    @rule(page=st.integers(1, 3))
    @precondition(lambda self: not self.pages)
    def a_list_begins(self, page: int) -> None:
        heard = self.heard
        super().a_list_begins(page)
        self.heard = heard

    def teardown(self) -> None:
        while self.pages:
            self.a_page_arrives()
        self.the_watch_tells(0)
        for uid in self.streams:
            while self.streams[uid]:
                self.the_watch_tells(1, [uid for uid, stream in self.streams.items() if stream].index(uid))
        super().teardown()


SETTINGS = settings(max_examples=5000 if SOAK else 300, stateful_step_count=40, derandomize=not SOAK, database=None)


@pytest.mark.parametrize("machine", [OneKind, OneKindStreamed])
def test_any_order_of_news_ends_with_what_the_api_server_has(machine: type[OneKind]) -> None:
    run_state_machine_as_test(seed(0)(machine), settings=SETTINGS)


def a_replica(*listed: Version[str], as_of: int = 10) -> Replica[str]:
    replica: Replica[str] = Replica()
    replica.begin_list(as_of)
    for version in listed:
        replica.add_listed(version)
    replica.end_list(as_of)
    return replica


def test_an_answer_stands_until_the_watch_has_caught_up_and_is_news_then() -> None:
    replica = a_replica(Version(A, "1", 5, "old"))
    replica.apply_answer(Version(A, "1", 12, "ours"))
    assert replica.apply_change(Version(A, "1", 11, "a rival's")) is None
    assert replica.get(A) == "ours"
    assert replica.apply_change(Version(A, "1", 12, "ours")) == Change(A, 12, "ours", "ours")
    assert replica.apply_change(Version(A, "1", 13, "ours")) is None, "nothing has changed that is kept"


def test_a_stream_that_is_behind_a_list_brings_nothing_back() -> None:
    replica = a_replica(Version(A, "1", 5, "x"))
    replica.begin_list(20)
    assert replica.end_list(20) == [Change(A, 20, "x", None)]
    assert replica.apply_streamed_change(Version(A, "1", 11, "y")) is None
    assert replica.apply_streamed_deletion(Version(A, "1", 12, "y")) is None
    assert replica.get(A) is None


def test_a_cluster_that_was_restored_from_a_backup_counts_from_there() -> None:
    kept, lost = NAMES[:2]
    replica = a_replica(Version(kept, "1", 90, "later"), Version(lost, "2", 95, "x"), as_of=100)
    replica.mark_gone(kept, "1")
    replica.begin_list(50)
    replica.add_listed(Version(kept, "1", 40, "earlier"))
    replica.end_list(50)
    assert (dict(replica.items()), replica.known_until) == ({kept: "earlier"}, 50)


def test_an_object_that_is_of_no_interest_any_more_is_like_a_deleted_one() -> None:
    replica = a_replica(Version(A, "1", 5, "x"))
    assert replica.apply_change(Version(A, "1", 11, None)) == Change(A, 11, "x", None)
    assert replica.get(A) is None
