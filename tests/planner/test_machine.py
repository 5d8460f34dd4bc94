"""The operator under every order of events that hypothesis finds.

Users suspend, resume, edit and delete; pods run, fail, vanish and wait for images; nodes die and come back; workers
report to either of two operators or to none; the clock is set back. The operators are the real reconciler. Each request
can fail before or after it took effect, each operator can die between any two effects, and the second acts on old
reads. Each operator has a memory, whose watches of the job and of its pods are late, each by any number of events.
There are no hints: hypothesis decides when a pass comes.

`tests.planner.laws` has the laws of every write; `teardown` says where everything must end after the trouble.
"""

import os
from datetime import timedelta
from typing import Any

from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from tests.planner import kubelet, scheduler
from tests.planner.laws import Ledger, active, broken_laws, is_finished
from tests.planner.mishaps import ENDINGS, ENDS, FIRED, LOSSES, STARTS, TROUBLES, fired
from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.operators import Crash, Operator, Pass, Trouble, decided
from tests.planner.surroundings import Surroundings
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import ReportPhase, State, Status
from tpu_training_operator.domain.actions import Plan
from tpu_training_operator.domain.lifecycle.pod_cleanup import is_on_lost_node
from tpu_training_operator.domain.lifecycle.weight import Weight, weight
from tpu_training_operator.domain.naming import WorkerId, is_placeholder
from tpu_training_operator.domain.observed import WorkerPod, parse_time
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.errors import Conflict

SOAK = os.environ.get("SOAK") == "1"
# How many reads an operator may be behind.
LONGEST_MEMORY = 30
# More events than there are.
ALL = 10**6
# How long to wait after the clock was set back, in steps of seconds.
MOST_PASSES = 300


class Gang(Surroundings):
    @initialize(
        slices=st.integers(1, 2),
        listens=st.sampled_from([True, True, False]),
        own_loop=st.sampled_from([False, False, True]),
        passes=st.integers(0, 5),
        window=st.sampled_from(["5m", "24h"]),
        limits=st.fixed_dictionaries(
            {
                "Infrastructure": st.integers(0, 4),
                "Preemption": st.sampled_from([-1, 1]),
                "UserError": st.integers(0, 2),
                "Unknown": st.integers(0, 2),
                "Hang": st.integers(0, 2),
                "OutOfMemory": st.just(1),
                "NotFinite": st.integers(0, 1),
            }
        ),
    )
    def apply_a_job(
        self, slices: int, listens: bool, own_loop: bool, passes: int, window: str, limits: dict[str, int]
    ) -> None:
        trainer = {"spec.trainer": {"image": "localhost/own:1", "command": ["python", "loop.py"]}}
        self.limits, self.window = limits, timedelta(minutes=5) if window == "5m" else timedelta(hours=24)
        changes: dict[str, Any] = {
            "spec.slice.acceleratorType": "v5litepod-8",
            "spec.slice.count": slices,
            "spec.trainer.backend": "XLASPMD",
            # Short, so that hypothesis finds gangs that are late and gangs that hang.
            "spec.runPolicy": {
                "startDeadlineSeconds": 60,
                "progressDeadlineSeconds": 120,
                "restart": {"limits": limits, "window": window},
            },
        }
        self.cluster = ModelCluster(changes | (trainer if own_loop else {}), listens=listens)
        self.prepare()
        self.operators = [Operator(self.cluster), Operator(self.cluster)]
        # One more than the gang needs: if two must be avoided, they have to be used again.
        self.nodes = [f"node-{i}" for i in range(2 * slices + 1)]
        stranger = kubelet.stranger("digits-99-0-0", attempt=99)
        self.strangers = {"digits-99-0-0": stranger}
        self.cluster.pods |= self.strangers
        self.begin_to_watch()
        # Most examples begin with a gang that runs already.
        self.all_goes_well_for_a_while(passes, which=0)

    def prepare(self) -> None:
        """For a cluster that has more."""

    def begin_to_watch(self) -> None:
        self.status = self.cluster.status
        self.ledger = Ledger(self.limits, self.window)
        self.memory = [self.cluster.read_all()]
        self.names_are_late = False
        # Workers that the second operator created after their attempt was over.
        self.late: set[str] = set()
        self.step = self.saved = 0

    # What the operators do, and what may go wrong.

    @rule(which=st.integers(0, 1), order=st.integers(0, 3))
    def a_pass(self, which: int, order: int) -> None:
        self.work(which, order=order)

    @rule(which=st.integers(0, 1), effects=st.integers(0, 6), order=st.integers(0, 3))
    def a_pass_with_a_crash(self, which: int, effects: int, order: int) -> None:
        if isinstance(self.work(which, lives_for=effects, order=order).error, Crash):
            fired("a crash amid a pass")

    @rule(
        which=st.integers(0, 1), at=st.integers(0, 2), kinds=st.permutations(sorted(TROUBLES)), order=st.integers(0, 3)
    )
    def requests_fail_for_a_while(self, which: int, at: int, kinds: list[str], order: int) -> None:
        for kind in kinds:
            error, done = TROUBLES[kind]
            if self.work(which, trouble=Trouble(at, error, done), order=order).met_trouble:
                fired(kind)
            self.cluster.now += timedelta(seconds=60)
            self.kubelets_work()

    @rule(
        which=st.integers(0, 1),
        rounds=st.lists(
            st.tuples(st.sampled_from([ALL, 0, 1, 2]), st.sampled_from([0, 1, 3, 9])), min_size=1, max_size=3
        ),
    )
    def passes_while_the_watches_are_late(self, which: int, rounds: list[tuple[int, int]]) -> None:
        """`rounds`: how many events of jobs and of pods the operator hears before each pass."""
        self.all_goes_well_for_a_while(3, which=1 - which)
        for jobs, pods in rounds:
            self.operators[which].hear(jobs, pods)
            attempt = self.cluster.status.attempt
            self.work(which, has_heard_all=False)
            fired("a pass on old news")
            if self.cluster.status.attempt > attempt:
                fired("an attempt on old news")
            self.kubelets_work()

    def work(self, which: int, **how: Any) -> Pass:
        """A pass on current news, unless told otherwise, and what no pass may do."""
        cluster, before = self.cluster, self.cluster.status
        foreign = {name: pod for name, pod in cluster.pods.items() if cluster.is_orphan(pod)}
        deadlines = {name: pod["metadata"].get("deletionTimestamp") for name, pod in cluster.pods.items()}
        leftovers = [
            pod
            for pod in self.own_pods()
            if attempt_of(pod) != before.attempt and not is_lost(pod) and not is_kept(pod, before)
        ]
        ended = {name for name, pod in cluster.pods.items() if pod["status"]["phase"] in ("Succeeded", "Failed")}
        was_there = not cluster.job_is_gone
        operator = self.operators[which]
        listening = operator.inbox.listening_since
        must_turn = was_there and _weighs(before, decided(cluster, operator.view()))
        done = operator.work(**how)

        if not is_finished(before) and _weighs(before, Plan(status=cluster.status)):
            assert must_turn, "an attempt begins or the job ends, although nothing is wrong"
        workers = (name for name in named(done, "create Pod/") if not is_placeholder(name, "digits"))
        created = {worker.attempt for name in workers if (worker := WorkerId.of_pod(name))}
        assert created <= {before.attempt}, "workers of an attempt that the status does not name"
        assert not (created and leftovers), "workers of two attempts exist together"
        assert all(cluster.pods.get(name) == pod for name, pod in foreign.items()), "another job's pod is touched"
        if is_finished(before):
            assert not ended & set(named(done, "delete Pod/")), "the logs of a job that has ended are deleted"
        for name in named(done, "delete Pod/", " by force"):
            fired("a deletion by force")
            if not how.get("has_heard_all", True) and deadlines.get(name) is None:
                # It has gone meanwhile. The uid does not fit to a namesake.
                continue
            assert parse_time(deadlines[name]) <= cluster.now, "by force before its grace period is over"
        if was_there and cluster.job_is_gone:
            fired("a job whose time is over")
            assert before.completion_time is not None
            assert parse_time(before.completion_time) + timedelta(seconds=50) <= cluster.now
        if operator.inbox.asked_for_stacks:
            fired("stacks asked for")
        if created:
            self.names_are_late = False
            known = {int(name.partition("-")[0]) for name in cluster.names}
            assert known <= {before.attempt}, "a name of an earlier attempt resolves"
        if not is_running(before) and is_running(cluster.status):
            fired("a gang that runs")
            workers = {pod["metadata"]["uid"] for pod in self.own_pods() if attempt_of(pod) == before.attempt}
            assert self.names_are_late or set(cluster.names.values()) == workers, (
                "the names lead to other pods than the workers"
            )
        self.see_what_was_written(listening)
        return done

    @rule(data=st.data(), effects=st.none() | st.integers(0, 6))
    def a_pass_of_the_second_operator_on_what_it_read_long_ago(self, data: st.DataObject, effects: int | None) -> None:
        read_job = data.draw(st.integers(0, len(self.memory) - 1), label="job read at")
        read_pods = data.draw(st.integers(read_job, len(self.memory) - 1), label="pods read at")
        seen = self.memory[read_job][0], self.memory[read_pods][1], self.memory[read_job][2]
        known = Status.read(seen[0].get("status")).attempt
        newer = [copied(pod) for pod in self.own_pods() if attempt_of(pod) > known]
        before, was_there = self.cluster.status, not self.cluster.job_is_gone
        already = {pod["metadata"]["uid"] for pod in self.own_pods()}
        listening = self.operators[1].inbox.listening_since
        done = self.operators[1].work(seen=seen, lives_for=effects)
        fired("a stale pass")
        if isinstance(done.error, Conflict):
            fired("a stale pass that conflicts")
        assert all(pod in self.own_pods() for pod in newer), "workers of an attempt that it does not know are touched"
        # Only a finished job is deleted, and a job stays finished.
        assert was_there is not self.cluster.job_is_gone or is_finished(before)
        # No API server can refuse a worker that is created too late; the next pass must delete it.
        over = {pod["metadata"]["uid"] for pod in self.own_pods() if attempt_of(pod) != self.cluster.status.attempt}
        self.late |= over - already
        # Nor names that are published too late. No worker asks for them: they contain the attempt.
        self.names_are_late = self.names_are_late or any("Endpoint" in effect for effect in done.effects)
        self.see_what_was_written(listening)

    def see_what_was_written(self, listening_since: Any) -> None:
        before, after, now = self.status, self.cluster.status, self.cluster.now
        created = parse_time(self.cluster.job["metadata"]["creationTimestamp"])
        assert broken_laws(before, after, created) == []
        assert self.ledger.follow(before, after, now) == [], "a budget is overdrawn"
        self.nothing_is_shown_that_no_worker_has_said(after)
        self.a_hang_was_long_enough(before, after, listening_since)
        self.count(before, after)
        if after.attempt > before.attempt:
            self.step = self.saved
        self.status = after
        self.memory = [*self.memory, self.cluster.read_all()][-LONGEST_MEMORY:]

    def nothing_is_shown_that_no_worker_has_said(self, status: Status) -> None:
        if progress := status.progress:
            assert (progress.checkpoint_step or 0) <= self.saved
            assert progress.phase is None or progress.step <= self.step

    def a_hang_was_long_enough(self, before: Status, after: Status, listening_since: Any) -> None:
        failure = after.last_failure
        if failure is None or failure == before.last_failure or failure.reason != "NoProgress":
            return
        fired("a restart for a hang" if after.attempt > before.attempt else "a job failed for a hang")
        limit = timedelta(seconds=120)
        assert listening_since is not None, "by an operator that does not listen"
        assert self.cluster.now - listening_since >= limit
        if before.progress and before.progress.last_advance_time:
            assert self.cluster.now - parse_time(before.progress.last_advance_time) >= limit

    def count(self, before: Status, after: Status) -> None:
        if is_finished(after) and not is_finished(before):
            fired(str(after.state))
        reasons = {condition.reason for condition in after.conditions}
        if {"DeadlineExceeded"} & reasons and not is_finished(before):
            fired("DeadlineExceeded")
            assert after.goodput is not None
            assert active(after.goodput) >= 200
        for reason in {"RestartLimitReached", "NotRetryable", "BudgetExceeded"} & reasons:
            if not is_finished(before):
                fired(reason)
        if after.attempt > before.attempt:
            kinds = {"PartlyPlaced": "a release", "Resumed": "a resumption"}
            for reason in kinds.keys() & reasons:
                fired(kinds[reason])
        if before.restarts.charged and not after.restarts.charged:
            fired("a refill")
        if after.avoided_nodes and not before.avoided_nodes:
            fired("a node avoided")
        if after.state is State.BLOCKED:
            fired("a blocked job")

    # What must hold after every step.

    @invariant()
    def workers_are_of_one_attempt_but_for_those_on_lost_nodes(self) -> None:
        running = (pod for pod in self.own_pods() if not scheduler.has_ended(pod))
        counted = (pod for pod in running if pod["metadata"]["uid"] not in self.late and not is_lost(pod))
        assert len({attempt_of(pod) for pod in counted}) <= 1

    @invariant()
    def no_worker_is_ahead_of_the_status(self) -> None:
        assert all(attempt_of(pod) <= self.cluster.status.attempt for pod in self.own_pods())

    @invariant()
    def strangers_are_left_alone(self) -> None:
        assert all(self.cluster.pods.get(name) == pod for name, pod in self.strangers.items())

    # Where everything ends.

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.strangers_leave()
        kubelet.nodes_come_back(self.cluster)
        self.run_until_quiet()
        if self.cluster.job_is_gone:
            assert (self.own_pods(), self.cluster.pods, self.cluster.others) == ([], {}, {})
            return
        status, job = self.cluster.status, self.cluster.job
        reasons = {condition.reason for condition in status.conditions}
        may_rest = job["spec"]["runPolicy"].get("suspend") or "BudgetExceeded" in reasons
        suspended = {State.SUSPENDED} if may_rest else set()
        assert status.state in {State.SUCCEEDED, State.FAILED} | suspended
        assert status.observed_generation == job["metadata"]["generation"]
        running = [pod for pod in self.own_pods() if pod["status"]["phase"] not in ("Succeeded", "Failed")]
        assert running == [], "workers of a job that has ended"
        if status.state is State.SUCCEEDED:
            # Fewer than before, if a user deleted some.
            assert {attempt_of(pod) for pod in self.own_pods() if not is_kept(pod, status)} <= {status.attempt}
        if status.state is State.SUSPENDED:
            assert self.own_pods() == []

    def run_until_quiet(self) -> None:
        """Until nothing changes and nothing is due. From then on no pass does anything, however late."""
        for _ in range(MOST_PASSES):
            before = self.cluster.read()
            done = self.work(0)
            assert done.error is None or self.cluster.job_is_gone
            if is_true(self.cluster.status.conditions, ConditionType.GANG_READY):
                self.all_pods_finish_well()
            self.kubelets_work()
            self.cluster.now += done.again or timedelta(0)
            if done.again is None and self.cluster.read() == before:
                break
        else:
            raise AssertionError(f"the operator does not come to rest: {done}, {self.cluster.status}")
        for later in (0, 600, 10**6):
            self.cluster.now += timedelta(seconds=later)
            assert [self.work(which).effects for which in (0, 1)] == [[], []], "it does something at rest"


def _weighs(before: Status, planned: Plan) -> bool:
    return weight(before, planned) is not Weight.NONE


def attempt_of(pod: Object) -> int:
    return int(pod["metadata"]["labels"]["tpu-operator.dev/attempt"])


def is_running(status: Status) -> bool:
    return is_true(status.conditions, ConditionType.GANG_READY)


def is_lost(pod: Object) -> bool:
    """Its node is lost, and the next attempt may start beside it."""
    return "deletionTimestamp" in pod["metadata"] and is_on_lost_node(WorkerPod(pod))


def is_kept(pod: Object, status: Status) -> bool:
    """It failed last, and its pod is kept for the log."""
    failure = status.last_failure
    return failure is not None and failure.pod == pod["metadata"]["name"] and scheduler.has_ended(pod)


def named(done: Pass, prefix: str, suffix: str = "") -> list[str]:
    effects = (effect for effect in done.effects if effect.startswith(prefix) and effect.endswith(suffix))
    return [effect.removeprefix(prefix).removesuffix(suffix) for effect in effects]


# The short run is the same every time, so that what happens in it does not depend on luck; the long one is random.
# Many rounds of few lives each: within a round, hypothesis mutates lives that it had before, and 50 lives of two seeds
# hold as many different mishaps as 200 of one.
SETTINGS = settings(
    max_examples=5000 if SOAK else 25,
    stateful_step_count=100 if SOAK else 50,
    derandomize=not SOAK,
    database=None,
)


LEAST_ROUNDS, MOST_ROUNDS = (1, 3) if SOAK else (6, 16)


def test_no_order_of_events_breaks_the_gang_and_every_fault_has_fired() -> None:
    FIRED.clear()
    reports = [f"report: {phase}" for phase in ReportPhase]
    for number in range(MOST_ROUNDS):
        # The seed, because without one any edit of the machine's text draws other lives.
        run_state_machine_as_test(seed(number)(Gang), settings=SETTINGS)
        missing = [what for what in (*ENDINGS, *STARTS, *LOSSES, *TROUBLES, *reports, *ENDS) if not FIRED[what]]
        if not missing and number + 1 >= LEAST_ROUNDS:
            return
    raise AssertionError(f"these have not happened once: {missing}; the others: {dict(FIRED)}")
