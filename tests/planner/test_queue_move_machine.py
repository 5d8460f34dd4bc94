"""The state machine of `test_machine` with a job that moves in a queue: Kueue has quota for a slice now and then, and
admits, evicts and admits again.

What must hold at every moment, besides what holds for a job that moves and for one in a queue: the quota of the slice
on which a worker was created is held for as long as the worker is active; a gang is created only on a slice that Kueue
has admitted, and when no other Workload holds quota; and each attempt has one slice.
"""

from typing import Any

from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from tests.planner import kueue
from tests.planner.mishaps import FIRED, fired
from tests.planner.operators import Pass
from tests.planner.test_machine import SETTINGS, SOAK, attempt_of, named
from tests.planner.test_move_machine import ALL_FREE, MovingGang, alternative_of
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.workload import Workload
from tpu_training_operator.kube.cluster import Object

# Numbers of slices: those of the job, and the trial of its ladder.
ALL = {0, 1, 2, 3, 101}
TOO_LARGE = ("Pending", "insufficient quota for google.com/tpu in flavor v5e, 16 > maximum capacity (0)")
EVICTIONS = ["Preempted", "PodsReadyTimeout", "ClusterQueueStopped"]


class QueuedMovingGang(MovingGang):
    def prepare(self) -> None:
        super().prepare()
        self.quota: set[int] = ALL
        # Workloads that somebody has deleted while workers were covered by them.
        self.is_robbed = False
        kueue.put_in_queue(self.cluster)

    def begin_to_watch(self) -> None:
        self.is_robbed = False
        # Workers by uid, and those that were created too late, by an operator that had read the job long ago.
        self.known: set[str] = set()
        self.uncovered: set[str] = set()
        super().begin_to_watch()

    @rule(quota=st.sets(st.sampled_from(sorted(ALL))))
    def the_quota_changes(self, quota: set[int]) -> None:
        self.quota = quota

    @rule(
        quota=st.sampled_from([{1, 101}, {2, 3}, {1, 2, 101}]),
        which=st.integers(0, 1),
        why=st.sampled_from(EVICTIONS),
    )
    def the_quota_is_taken_for_a_while(self, quota: set[int], which: int, why: str) -> None:
        self.quota = quota
        self.kueue_evicts(why)
        self.all_goes_well_for_a_while(6, which)

    @rule(which=st.integers(0, 1))
    def all_quota_is_free_for_a_while(self, which: int) -> None:
        self.quota, self.free = ALL, ALL_FREE
        self.a_checkpoint_is_saved(which)
        self.all_goes_well_for_a_while(6, which)

    @rule(reason=st.sampled_from(EVICTIONS))
    def kueue_evicts(self, reason: str) -> None:
        """One of the job's Workloads, or both."""
        for number in kueue.numbers(self.cluster):
            if kueue.seen(self.cluster, number).is_admitted and not self.cluster.job_is_gone:
                kueue.evict(self.cluster, reason, number)
                fired("an eviction")

    @rule(number=st.integers(0, 2), which=st.integers(0, 1))
    def kueue_says_that_a_slice_is_too_large(self, number: int, which: int) -> None:
        self.kueue_evicts("ClusterQueueStopped")
        self.quota = ALL - {number}
        for _ in range(4):
            self.all_goes_well_for_a_while(1, which)
            found = kueue.workload(self.cluster, number)
            if found is not None and Workload(found).waits_in_line and not Workload(found).holds_quota:
                kueue.pend(self.cluster, *TOO_LARGE, number)

    @rule(sure=st.integers(0, 9))
    def a_workload_is_deleted(self, sure: int) -> None:
        """Rarely."""
        numbers = kueue.numbers(self.cluster)
        if sure < len(numbers) and sure < 2 and not self.cluster.job_is_gone:
            del self.cluster.others[f"Workload/{kueue.seen(self.cluster, numbers[sure]).name}"]
            self.is_robbed = True
            fired("a Workload deleted")

    @rule()
    def kueue_works(self) -> None:
        if not self.cluster.job_is_gone:
            kueue.works(self.cluster, free=self.quota)

    @rule()
    def kubelets_work(self) -> None:
        super().kubelets_work()
        self.kueue_works()

    def work(self, which: int, **how: Any) -> Pass:
        before = {number for number in kueue.numbers(self.cluster) if kueue.seen(self.cluster, number).is_admitted}
        held = self.holding()
        known = self.cluster.status.placement
        done = super().work(which, **how)
        if named(done, "create Pod/"):
            slice_ = known.alternative if known else 0
            assert slice_ in before, "workers on a slice that Kueue has not admitted"
        if len(held) > 1:
            fired("quota for two slices")
        assert self.held() == [], "placeholders in a queue"
        return done

    def see_what_was_written(self, listening_since: Any) -> None:
        super().see_what_was_written(listening_since)
        new = [pod for pod in self.own_pods() if pod["metadata"]["uid"] not in self.known]
        self.known |= {pod["metadata"]["uid"] for pod in new}
        self.uncovered |= {pod["metadata"]["uid"] for pod in new if not self.is_covered(pod)}

    def is_covered(self, pod: Object) -> bool:
        found = kueue.workload(self.cluster, alternative_of(pod))
        return found is not None and _holds(Workload(found))

    def holding(self) -> list[int]:
        return [n for n in kueue.numbers(self.cluster) if _holds(kueue.seen(self.cluster, n))]

    def count(self, before: Status, after: Status) -> None:
        super().count(before, after)
        placement = after.placement
        if placement and before.placement and len(placement.moves) > len(before.placement.moves):
            is_proven = is_true(after.conditions, ConditionType.ADMITTED)
            assert is_proven or placement.moves[-1].reason != "Better", "a gang gives up its slice without proof"

    @invariant()
    def the_quota_of_its_slice_covers_every_worker(self) -> None:
        """Unless the Workload was taken away, or the worker was created by an operator that was late; `work` checks
        those that were not."""
        if self.is_robbed or self.cluster.job_is_gone:
            self.is_robbed = self.is_robbed and self.own_pods() != []
            return
        for pod in self.own_pods():
            has_ended = pod["status"]["phase"] in ("Succeeded", "Failed")
            is_late = self.is_late(pod) or pod["metadata"]["uid"] in self.uncovered
            assert has_ended or is_late or self.is_covered(pod), f"no quota for {pod['metadata']['name']}"
            assert attempt_of(pod) <= self.cluster.status.attempt

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.quota = ALL
        super().teardown()
        if not self.cluster.job_is_gone:
            assert self.holding() == [], "a job that is over holds quota"


def _holds(found: Workload) -> bool:
    return found.holds_quota and not found.is_finished


QUEUED: Any = settings(SETTINGS, max_examples=2000 if SOAK else 20)
EXPECTED = (
    *("a move: NoCapacity", "a move: Lost", "a move: Refused", "a move: Better"),
    *("an eviction", "quota for two slices", "a Workload deleted", "Succeeded"),
)
MOST_ROUNDS = 3


def test_no_order_of_events_gives_a_job_that_moves_workers_without_quota_or_two_gangs() -> None:
    FIRED.clear()
    for number in range(MOST_ROUNDS):
        run_state_machine_as_test(seed(number)(QueuedMovingGang), settings=QUEUED)
        missing = [what for what in EXPECTED if not FIRED[what]]
        if not missing:
            return
    raise AssertionError(f"these have not happened once: {missing}; the others: {dict(FIRED)}")
