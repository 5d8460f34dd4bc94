"""The attempt protocol under every order of events that hypothesis can think of.

Pods run, fail, vanish and are deleted by hand; users suspend, resume and edit; the operator crashes between any two
effects; a second one acts on what it read long ago. Its reads are as the reconciler's: consistent, the job before the
pods. What no order may break are the invariants; where it ends when the trouble ends is `teardown`.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.planner import kubelet
from tests.planner.model_cluster import Conflict, Crash, ModelCluster, Object, actions, one_pass
from tests.planner.story import reason
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.actions import Create
from tpu_training_operator.domain.naming import WorkerId

# As many reads as an operator may be behind.
LONGEST_MEMORY = 30
MOST_PASSES = 60


def attempt_of(pod: Object) -> int:
    return int(pod["metadata"]["labels"]["tpu-operator.dev/attempt"])


def is_finished(status: Status) -> bool:
    return is_true(status.conditions, ConditionType.SUCCEEDED) or is_true(status.conditions, ConditionType.FAILED)


def uids(pods: Iterable[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


Mishap = Callable[[ModelCluster, Object], None]

MISHAPS: list[Mishap] = [
    *(partial(kubelet.end, code=code) for code in (0, 1, 3, 69, 69, 70, 75, 78, 137, 137, 137, 143)),
    partial(kubelet.end, code=137, reason="OOMKilled"),
    kubelet.place,
    kubelet.start,
    kubelet.refuse,
    kubelet.delete_by_hand,
    kubelet.vanish,
]


class Gang(RuleBasedStateMachine):
    @initialize(
        slices=st.integers(1, 2),
        limits=st.fixed_dictionaries(
            {
                "Infrastructure": st.integers(0, 3),
                "Preemption": st.sampled_from([-1, 1]),
                "UserError": st.integers(0, 1),
                "Unknown": st.integers(0, 1),
            }
        ),
    )
    def apply_a_job(self, slices: int, limits: dict[str, int]) -> None:
        self.limits = limits
        self.cluster = ModelCluster(
            {
                "spec.slice.acceleratorType": "v5litepod-8",
                "spec.slice.count": slices,
                # Short, so that hypothesis finds gangs that are held up.
                "spec.runPolicy": {"startDeadlineSeconds": 60, "restart": {"limits": limits}},
            }
        )
        stranger = kubelet.stranger("digits-99-0-0", attempt=99)
        self.strangers: dict[str, Object] = {"digits-99-0-0": stranger}
        self.cluster.pods |= self.strangers
        self.memory = [self.cluster.read()]
        # Workers that the second operator asked for when their attempt was over.
        self.late: set[str] = set()
        self.status = self.cluster.status

    def own_pods(self) -> list[Object]:
        return [pod for name, pod in sorted(self.cluster.pods.items()) if name not in self.strangers]

    # What happens to pods.

    @rule(data=st.data(), mishap=st.sampled_from(MISHAPS))
    def a_pod_has_a_mishap(self, data: st.DataObject, mishap: Mishap) -> None:
        if pods := self.own_pods():
            mishap(self.cluster, data.draw(st.sampled_from(pods)))

    @rule()
    def deleted_pods_go(self) -> None:
        kubelet.sweep(self.cluster)

    @rule()
    def all_pods_finish_well(self) -> None:
        for pod in self.own_pods():
            kubelet.end(self.cluster, pod)

    # What people do.

    @rule(fields=st.sampled_from([{"suspend": True}, {"suspend": False}, {}]))
    def the_user_edits_the_run_policy(self, fields: dict[str, bool]) -> None:
        self.cluster.edit_run_policy(**fields)

    @rule(takes=st.booleans())
    def strangers_take_the_name_of_a_worker_or_leave(self, takes: bool) -> None:
        name = WorkerId(self.status.attempt + 1, 0, 0).pod_name("digits")
        if not takes:
            self.strangers_leave()
        elif name not in self.cluster.pods:
            self.strangers[name] = self.cluster.pods[name] = kubelet.stranger(name, attempt=0)

    def strangers_leave(self) -> None:
        for name in self.strangers:
            del self.cluster.pods[name]
        self.strangers = {}

    @rule(seconds=st.integers(1, 400))
    def time_passes(self, seconds: int) -> None:
        self.cluster.now += timedelta(seconds=seconds)

    # What the operator does, and what may go wrong with it.

    @rule(passes=st.integers(1, 6))
    def all_goes_well_for_a_while(self, passes: int) -> None:
        for _ in range(passes):
            self.kubelets_work()
            self.a_pass(turn=0)
            self.each_step_is_lawful()
            self.cluster.now += timedelta(seconds=60)

    @rule(turn=st.integers(0, 3))
    def a_pass(self, turn: int) -> None:
        before = self.cluster.status
        leftovers = uids(pod for pod in self.own_pods() if attempt_of(pod) != before.attempt)
        decided = one_pass(self.cluster, turn=turn)
        created = {attempt_of(a.body) for a in actions(decided) if isinstance(a, Create) and a.body["kind"] == "Pod"}
        assert created <= {before.attempt}, "workers of another attempt than the status said"
        assert not (created and leftovers), "workers beside those of another attempt"
        if self.cluster.status.attempt == before.attempt:
            kept = [pod for pod in self.own_pods() if pod["metadata"]["uid"] in leftovers]
            assert all(kubelet.is_going(pod) for pod in kept), "a leftover is kept"

    @rule(effects=st.integers(0, 6), turn=st.integers(0, 3))
    def a_pass_with_a_crash(self, effects: int, turn: int) -> None:
        with contextlib.suppress(Crash):
            one_pass(self.cluster, effects=effects, turn=turn)

    @rule(data=st.data(), effects=st.none() | st.integers(0, 6))
    def a_pass_of_a_second_operator_that_read_long_ago(self, data: st.DataObject, effects: int | None) -> None:
        read_job = data.draw(st.integers(0, len(self.memory) - 1), label="job read at")
        read_pods = data.draw(st.integers(read_job, len(self.memory) - 1), label="pods read at")
        job, pods = self.memory[read_job][0], self.memory[read_pods][1]
        known = Status.model_validate(job.get("status") or {}).attempt
        newer = [copy.deepcopy(pod) for pod in self.own_pods() if attempt_of(pod) > known]
        before = uids(self.own_pods())
        with contextlib.suppress(Crash, Conflict):
            one_pass(self.cluster, (job, pods), effects=effects)
        assert all(pod in self.own_pods() for pod in newer), (
            "workers of an attempt that it does not know of are touched"
        )
        # No API server can refuse a worker that is asked for too late; the next pass must.
        over = [pod for pod in self.own_pods() if attempt_of(pod) != self.status.attempt]
        self.late |= uids(over) - before

    # What must hold after each of them.

    @invariant()
    def workers_are_of_one_attempt(self) -> None:
        attempts = {attempt_of(pod) for pod in self.own_pods() if pod["metadata"]["uid"] not in self.late}
        assert len(attempts) <= 1

    @invariant()
    def no_worker_is_ahead_of_the_status(self) -> None:
        assert all(attempt_of(pod) <= self.cluster.status.attempt for pod in self.own_pods())

    @invariant()
    def strangers_are_left_alone(self) -> None:
        assert all(self.cluster.pods.get(name) == pod for name, pod in self.strangers.items())

    @invariant()
    def no_budget_is_overdrawn(self) -> None:
        limits = {"OutOfMemory": 1} | self.limits
        spent = self.cluster.status.restarts.by_class
        assert all(count <= limits[kind] or limits[kind] == -1 for kind, count in spent.items())

    @invariant()
    def it_is_ready_or_in_progress_or_stuck(self) -> None:
        conditions = self.cluster.status.conditions
        pictures = (ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED)
        assert [is_true(conditions, kind) for kind in pictures].count(True) == bool(conditions)

    @invariant()
    def each_step_is_lawful(self) -> None:
        before, after = self.status, self.cluster.status
        charged = after.restarts.total - before.restarts.total
        assert after.attempt - before.attempt in (0, 1), "an attempt is skipped or taken back"
        assert 0 <= charged <= after.attempt - before.attempt, "a restart is charged twice, or to no attempt"
        if after.attempt > before.attempt > 0 and not charged:
            resumed = is_true(before.conditions, ConditionType.SUSPENDED)
            assert resumed or reason(after) == ("False", "PartlyPlaced"), "an attempt for nothing"
        if is_finished(before):
            assert (after.state, after.attempt) == (before.state, before.attempt), "the end is not the end"
        self.status = after
        self.memory = [*self.memory, self.cluster.read()][-LONGEST_MEMORY:]

    # Where it ends.

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.strangers_leave()
        self.run_until_quiet()
        status, job = self.cluster.status, self.cluster.job
        suspended = {State.SUSPENDED} if job["spec"]["runPolicy"].get("suspend") else set()
        assert status.state in {State.SUCCEEDED, State.FAILED} | suspended
        assert status.observed_generation == job["metadata"]["generation"]

    def run_until_quiet(self) -> None:
        for _ in range(MOST_PASSES):
            before = self.cluster.read()
            decided = one_pass(self.cluster)
            if is_true(self.cluster.status.conditions, ConditionType.GANG_READY):
                self.all_pods_finish_well()
            self.kubelets_work()
            self.cluster.now += decided.again or timedelta(0)
            if decided.again is None and self.cluster.read() == before:
                assert actions(decided) == []
                return
        raise AssertionError("the operator does not come to rest")

    def kubelets_work(self) -> None:
        kubelet.sweep(self.cluster)
        for pod in self.own_pods():
            kubelet.make_ready(self.cluster, pod)


Gang.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestGang = Gang.TestCase
