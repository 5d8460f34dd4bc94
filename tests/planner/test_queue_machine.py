"""The state machine of `test_machine` with a job in a queue: Kueue admits, evicts and re-admits it at any time.

What must hold at every moment: workers are created only while Kueue admits the job; quota is given back only when no
worker is active (`ModelCluster.write_workload_status` checks it at the write); and while the job is admitted, Kueue is
told whether its workers are ready.
"""

from typing import Any

from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from tests.planner import kueue
from tests.planner.mishaps import FIRED, fired
from tests.planner.operators import Pass
from tests.planner.test_machine import SETTINGS, SOAK, Gang, is_running, named
from tpu_training_operator.api.conditions import ConditionType, find, is_true
from tpu_training_operator.domain.workload import Workload


class QueuedGang(Gang):
    has_room = True

    def prepare(self) -> None:
        kueue.put_in_queue(self.cluster)

    @rule(reason=st.sampled_from(["Preempted", "PodsReadyTimeout", "ClusterQueueStopped", "NodeFailures"]))
    def kueue_evicts(self, reason: str) -> None:
        found = kueue.workload(self.cluster)
        if found is not None and Workload(found).is_admitted and not self.cluster.job_is_gone:
            kueue.evict(self.cluster, reason)
            fired("an eviction")

    @rule(has_room=st.sampled_from([True, True, False]))
    def the_quota_changes(self, has_room: bool) -> None:
        self.has_room = has_room

    @rule()
    def kueue_works(self) -> None:
        if not self.cluster.job_is_gone:
            kueue.works(self.cluster, has_room=self.has_room)

    @rule(sure=st.integers(0, 9))
    def the_workload_is_deleted(self, sure: int) -> None:
        """Rarely."""
        found = kueue.workload(self.cluster)
        if sure == 0 and found is not None and not self.cluster.job_is_gone:
            del self.cluster.others[f"Workload/{found['metadata']['name']}"]
            fired("a Workload deleted")

    @rule()
    def kubelets_work(self) -> None:
        super().kubelets_work()
        self.kueue_works()

    def work(self, which: int, **how: Any) -> Pass:
        before = kueue.workload(self.cluster)
        was_admitted, held = before is not None and Workload(before).is_admitted, _holds(before)
        was_held = _is_held(self)
        done = super().work(which, **how)
        assert was_admitted or not named(done, "create Pod/"), "workers of a job that is not admitted"
        if held and not _holds(kueue.workload(self.cluster)):
            fired("quota given back")
        if was_held and not _is_held(self):
            fired("an attempt after an eviction")
        is_up_to_date = how.get("has_heard_all", True) and "write status" not in done.effects
        if done.error is None and is_up_to_date and not done.met_trouble:
            self.kueue_knows_whether_the_workers_are_ready()
        return done

    def kueue_knows_whether_the_workers_are_ready(self) -> None:
        found, status = kueue.workload(self.cluster), self.cluster.status
        if found is None or self.cluster.job_is_gone or not Workload(found).is_admitted or not status.attempt:
            return
        if is_true(status.conditions, ConditionType.ADMITTED) and status.completion_time is None:
            told = Workload(found).condition("PodsReady").get("status")
            assert told == ("True" if is_running(status) else "False")

    def run_until_quiet(self) -> None:
        self.has_room = True
        super().run_until_quiet()
        found = kueue.workload(self.cluster)
        if found is not None and not self.cluster.job_is_gone:
            assert not _holds(found), "a job that is over holds quota"


def _holds(body: Any) -> bool:
    return body is not None and Workload(body).holds_quota and not Workload(body).is_finished


def _is_held(gang: Gang) -> bool:
    admitted = find(gang.cluster.status.conditions, ConditionType.ADMITTED)
    return admitted is not None and not admitted.is_true


FEWER = settings(SETTINGS, max_examples=5000 if SOAK else 25)
ENDS = ("an eviction", "quota given back", "an attempt after an eviction", "a Workload deleted", "Succeeded", "Failed")
MOST_ROUNDS = 3


def test_no_order_of_events_gives_workers_without_quota_or_quota_while_there_are_workers() -> None:
    FIRED.clear()
    for number in range(MOST_ROUNDS):
        run_state_machine_as_test(seed(number)(QueuedGang), settings=FEWER)
        if all(FIRED[what] for what in ENDS):
            return
    raise AssertionError(f"not once: {[what for what in ENDS if not FIRED[what]]}; the others: {dict(FIRED)}")
