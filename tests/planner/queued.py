"""A job in a queue: Kueue admits, evicts and re-admits it at any time, and if it moves, each of its Workloads.

What must hold at every moment: the quota of the slice on which a worker was created is held for as long as the worker
is active (`ModelCluster.write_workload_status` checks it at the write); a gang is created only on a slice that Kueue
has admitted, and when no other Workload holds quota; and while the job is admitted, Kueue is told whether its workers
are ready.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.planner import kueue
from tests.planner.gang import attempt_of, is_running, named
from tests.planner.mishaps import fired
from tests.planner.moving import ALL_FREE, MovingGang, alternative_of
from tests.planner.operators import Pass
from tests.planner.story import ready_message
from tpu_training_operator.api.conditions import ConditionType, find, is_true
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.workload import Workload, is_in_queue
from tpu_training_operator.kube.cluster import Object

# Numbers of slices: those of the job, and the lower rung of its ladder.
ALL = {0, 1, 2, 3, 101}
TOO_LARGE = ("Pending", "insufficient quota for google.com/tpu in flavor v5e, 16 > maximum capacity (0)")
EVICTIONS = ["Preempted", "PodsReadyTimeout", "ClusterQueueStopped", "NodeFailures"]


class QueuedGang(MovingGang):
    @property
    def is_queued(self) -> bool:
        return bool(self.features["is queued"])

    def prepare(self) -> None:
        super().prepare()
        self.quota: set[int] = ALL
        if self.is_queued:
            kueue.put_in_queue(self.cluster)

    def begin_to_watch(self) -> None:
        # Whether somebody has deleted Workloads, or edited them, while workers were covered by them.
        self.is_robbed = False
        # Workers by uid, and those that were created too late, by an operator that had read the job long ago.
        self.known: set[str] = set()
        self.uncovered: set[str] = set()
        super().begin_to_watch()

    @precondition(lambda self: self.is_queued)
    @rule(quota=st.sets(st.sampled_from(sorted(ALL))))
    def the_quota_changes(self, quota: set[int]) -> None:
        self.quota = quota

    @precondition(lambda self: self.is_queued)
    @rule(
        quota=st.sampled_from([{1, 101}, {2, 3}, {1, 2, 101}]),
        which=st.integers(0, 1),
        why=st.sampled_from(EVICTIONS),
    )
    def the_quota_is_taken_for_a_while(self, quota: set[int], which: int, why: str) -> None:
        self.quota = quota
        self.kueue_evicts(why)
        self.all_goes_well_for_a_while(6, which)

    @precondition(lambda self: self.is_queued)
    @rule(which=st.integers(0, 1))
    def all_quota_is_free_for_a_while(self, which: int) -> None:
        self.quota, self.free = ALL, ALL_FREE
        self.a_checkpoint_is_saved(which)
        self.all_goes_well_for_a_while(6, which)

    @precondition(lambda self: self.is_queued)
    @rule(reason=st.sampled_from(EVICTIONS))
    def kueue_evicts(self, reason: str) -> None:
        """One of the job's Workloads, or both."""
        for number in kueue.numbers(self.cluster):
            if kueue.seen(self.cluster, number).is_admitted and not self.cluster.job_is_gone:
                kueue.evict(self.cluster, reason, number)
                fired("an eviction")

    @precondition(lambda self: self.is_queued)
    @rule(number=st.integers(0, 2), which=st.integers(0, 1))
    def kueue_says_that_a_slice_is_too_large(self, number: int, which: int) -> None:
        self.kueue_evicts("ClusterQueueStopped")
        self.quota = ALL - {number}
        for _ in range(4):
            self.all_goes_well_for_a_while(1, which)
            found = kueue.workload(self.cluster, number)
            if found is not None and Workload(found).waits_in_line and not Workload(found).holds_quota:
                kueue.pend(self.cluster, *TOO_LARGE, number)

    @precondition(lambda self: self.is_queued)
    @rule(sure=st.integers(0, 9))
    def a_workload_is_deleted(self, sure: int) -> None:
        """Rarely."""
        numbers = kueue.numbers(self.cluster)
        if sure < len(numbers) and sure < 2 and not self.cluster.job_is_gone:
            del self.cluster.others[f"Workload/{kueue.seen(self.cluster, numbers[sure]).name}"]
            self.is_robbed = True
            fired("a Workload deleted")

    @precondition(lambda self: self.is_queued)
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
        held, was_held = self.holding(), self.waits_in_queue()
        known, is_queued = self.cluster.status.placement, is_in_queue(self.cluster.job)
        done = super().work(which, **how)
        if not is_queued:
            return done
        if named(done, "create Pod/") != [] and not is_only_check(named(done, "create Pod/")):
            slice_ = known.option_index if known and self.moves else 0
            is_known = known is not None or not self.moves
            assert slice_ in before or not is_known, "workers on a slice that Kueue has not admitted"
        if len(held) > 1:
            fired("quota for two slices")
        if held and not self.holding():
            fired("quota given back")
        if was_held and not self.waits_in_queue():
            fired("an attempt after an eviction")
        assert self.held() == [], "placeholders in a queue"
        is_up_to_date = how.get("has_heard_all", True) and "write status" not in done.effects
        if done.error is None and is_up_to_date and not done.met_trouble:
            self.kueue_knows_whether_the_workers_are_ready()
        return done

    def kueue_knows_whether_the_workers_are_ready(self) -> None:
        status = self.cluster.status
        number = status.placement.option_index if status.placement and self.moves else 0
        found = kueue.workload(self.cluster, number)
        is_over = self.cluster.job_is_gone or status.completion_time is not None or self.is_edited or self.is_unreadable
        if is_over or found is None or not Workload(found).is_admitted or not status.attempt:
            return
        if is_true(status.conditions, ConditionType.ADMITTED):
            told = Workload(found).condition("PodsReady").get("status")
            assert told == ("True" if is_running(status) else "False")

    def waits_in_queue(self) -> bool:
        admitted = find(self.cluster.status.conditions, ConditionType.ADMITTED)
        return admitted is not None and not admitted.is_true

    def see_what_was_written(self, listening_since: Any) -> None:
        super().see_what_was_written(listening_since)
        if not self.is_queued:
            return
        new = [pod for pod in self.own_pods() if pod["metadata"]["uid"] not in self.known]
        self.known |= {pod["metadata"]["uid"] for pod in new}
        self.uncovered |= {pod["metadata"]["uid"] for pod in new if not self.is_covered(pod)}

    def is_covered(self, pod: Object) -> bool:
        found = kueue.workload(self.cluster, alternative_of(pod))
        return (
            found is not None
            and _holds(Workload(found))
            and _limits(found["spec"]["podSets"][0]["template"]) == _limits(pod)
        )

    def holding(self) -> list[int]:
        return [n for n in kueue.numbers(self.cluster) if _holds(kueue.seen(self.cluster, n))]

    def count(self, before: Status, after: Status) -> None:
        super().count(before, after)
        placement = after.placement
        if (
            self.is_queued
            and not self.is_edited
            and placement
            and before.placement
            and len(placement.moves) > len(before.placement.moves)
        ):
            is_proven = is_true(after.conditions, ConditionType.ADMITTED)
            assert is_proven or placement.moves[-1].reason != "Better", "a gang gives up its slice without proof"

    @invariant()
    def the_quota_of_its_slice_covers_every_worker(self) -> None:
        """Unless the Workload was taken away, or the worker was created by an operator that was late; `work` checks
        those that were not."""
        if not is_in_queue(self.cluster.job) or self.is_edited:
            return
        if self.is_robbed or self.cluster.job_is_gone:
            self.is_robbed = self.is_robbed and self.own_pods() != []
            return
        for pod in self.own_pods():
            has_ended = pod["status"]["phase"] in ("Succeeded", "Failed")
            is_late = self.is_late(pod) or pod["metadata"]["uid"] in self.uncovered
            assert has_ended or is_late or self.is_covered(pod), f"no quota for {pod['metadata']['name']}"
            assert attempt_of(pod) <= self.cluster.status.attempt

    def trouble_is_over(self) -> None:
        super().trouble_is_over()
        self.quota = ALL

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "cluster") and self.is_queued and not self.cluster.job_is_gone:
            assert self.holding() == [], f"a job that is over holds quota: {ready_message(self.cluster)}"

    def kueue_takes_its_quota_back(self) -> None:
        if not is_in_queue(self.cluster.job):
            # Without its label and without the condition Admitted, nobody knows of its queue.
            return
        self.quota = set()
        for number in kueue.numbers(self.cluster):
            kueue.evict(self.cluster, "Preempted", number)
        for _ in self.goes_on(900):
            pass
        assert (self.active_workers(), self.holding()) == ([], []), "an eviction is not obeyed"


def is_only_check(created: list[str]) -> bool:
    return created == ["digits-entry-check"]


def _limits(pod: Object) -> Object:
    """What quota counts."""
    limits: Object = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return limits


def _holds(found: Workload) -> bool:
    return found.holds_quota and not found.is_finished
