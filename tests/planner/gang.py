"""The operator under every order of events that hypothesis finds.

Users suspend, resume, edit and delete; pods run, fail, vanish and wait for images; nodes die and come back; workers
report to either of two operators or to none; the clock is set back. The operators are the real reconciler. Each request
can fail before or after it took effect, each operator can die between any two effects, and the second acts on old
reads. Each operator has a memory, whose watches of the job and of its pods are late, each by any number of events.
There are no hints: hypothesis decides when a pass comes.

`tests.planner.laws` has the laws of every write; `teardown` says where everything must end after the trouble.
`test_machine` adds what a job may have besides: other slices, a queue, a check, and a careless administrator.
"""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any

import jsonschema
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.planner import kubelet, scheduler
from tests.planner.laws import OF_WHOLE_STATUSES, Ledger, active, broken_laws, is_finished
from tests.planner.mishaps import TROUBLES, fired
from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.operators import Crash, Operator, Pass, Trouble, decided, seen_in
from tests.planner.story import ready_message
from tests.planner.surroundings import Surroundings
from tests.unit.jobs import restart_limits
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.crd import structural_schema
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, parse_time
from tpu_training_operator.domain.job.naming import WorkerId, is_placeholder
from tpu_training_operator.domain.plan.common.pod_cleanup import is_on_lost_node
from tpu_training_operator.domain.plan.plan import Freshness
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.encoding import decode, encode
from tpu_training_operator.kube.errors import Conflict

SOAK = os.environ.get("SOAK") == "1"
# How many reads an operator may be behind.
LONGEST_MEMORY = 30
# More events than there are.
ALL = 10**6
# How long to wait after the clock was set back, in steps of seconds.
MOST_PASSES = 300
LOOKS_AT_REST = 40


LONGEST_STEP = timedelta(minutes=1)
_PARTS = {name: jsonschema.Draft7Validator(schema) for name, schema in structural_schema(Status)["properties"].items()}
# What may meet in one job, besides what `apply_a_job` draws.
FEATURES: dict[str, st.SearchStrategy[Any]] = {
    "moves": st.booleans(),
    "climbs": st.booleans(),
    "is queued": st.booleans(),
    "is checked": st.sampled_from([False, False, True]),
    "policy": st.sampled_from(
        [
            *({}, {}, {"budget": {"chipHours": 1}}, {"budget": {"chipHours": 3, "onExceeded": "Fail"}}),
            *({"activeDeadlineSeconds": 2000}, {"ttlSecondsAfterFinished": 50}),
        ]
    ),
    "slice check": st.sampled_from(["Skip", "Skip", "Check"]),
    # Seconds by which the clock of the second operator is ahead.
    "skew": st.sampled_from([0, 0, 0, -200, 300]),
    "is careless": st.sampled_from([False, True]),
    "is readable in the end": st.booleans(),
    "ends by": st.sampled_from(["nothing", "nothing", "a budget", "a deadline", "a suspension", "an eviction"]),
}


class Gang(Surroundings):
    @initialize(
        features=st.fixed_dictionaries(FEATURES),
        slices=st.integers(1, 2),
        listens=st.sampled_from([True, True, False]),
        own_loop=st.sampled_from([False, False, True]),
        passes=st.integers(0, 5),
        window=st.sampled_from([300, 86400]),
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
        self,
        features: dict[str, Any],
        slices: int,
        listens: bool,
        own_loop: bool,
        passes: int,
        window: int,
        limits: dict[str, int],
    ) -> None:
        trainer = {"spec.trainer": {"image": "localhost/own:1", "command": ["python", "loop.py"]}}
        self.features = features
        self.limits, self.window = limits, timedelta(seconds=window)
        changes: dict[str, Any] = {
            "spec.slice.acceleratorType": "v5litepod-8",
            "spec.slice.count": slices,
            "spec.trainer.backend": "XLASPMD",
            # Short, so that hypothesis finds gangs that are late and gangs that hang.
            "spec.runPolicy": {
                "startDeadlineSeconds": 60,
                "progressDeadlineSeconds": 120,
                "sliceCheck": features["slice check"],
                "restart": {"limits": restart_limits(limits), "windowSeconds": window},
                **features["policy"],
            },
        }
        self.cluster = ModelCluster(changes | (trainer if own_loop else {}), listens=listens)
        self.prepare()
        self.operators = [Operator(self.cluster), Operator(self.cluster, skew=timedelta(seconds=features["skew"]))]
        # One more than the gang needs: if two must be avoided, they have to be used again.
        self.nodes = [f"node-{i}" for i in range(2 * slices + 1)]
        stranger = kubelet.stranger("digits-99-0-0", attempt=99)
        self.strangers = {"digits-99-0-0": stranger}
        self.cluster.pods |= self.strangers
        self.begin_to_watch()
        # Most examples begin with a gang that runs already.
        self.all_goes_well_for_a_while(passes, which=0)

    def prepare(self) -> None:
        """For a job that has more."""

    # Whether this operator cannot read the spec.
    is_unreadable = False

    def begin_to_watch(self) -> None:
        self.status = self.cluster.status
        self.ledger = Ledger(self.limits, self.window)
        self.memory = [(self.cluster.now, self.cluster.picture())]
        self.names_are_late = False
        # Whether somebody has edited the status: then what it says is not what the operators wrote.
        self.is_edited = False
        # Workers that somebody has hidden from the operators.
        self.hidden: set[str] = set()
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
        knows_the_end = is_finished(before) and (how.get("has_heard_all", True) or operator.has_heard_of_every_write())
        picture, inbox, now = cluster.picture(), operator.inbox, operator.clock()
        done = operator.work(**how)

        if not is_finished(before) and has_turned(before, cluster.status):
            seen = seen_in(cluster, picture, inbox)
            must_turn = was_there and decided(cluster, seen, now).freshness is not Freshness.CACHED
            assert must_turn, "an attempt begins or the job ends, although nothing is wrong"
        workers = (name for name in named(done, "create Pod/") if not is_placeholder(name, "digits"))
        created = {worker.attempt for name in workers if (worker := WorkerId.of_pod(name))}
        assert created <= {before.attempt}, "workers of an attempt that the status does not name"
        assert not (created and leftovers), "workers of two attempts exist together"
        assert all(cluster.pods.get(name) == pod for name, pod in foreign.items()), "another job's pod is touched"
        if knows_the_end and not self.is_edited:
            assert not ended & set(named(done, "delete Pod/")), "the logs of a job that has ended are deleted"
        for name in [] if self.features["skew"] else named(done, "delete Pod/", " by force"):
            fired("a deletion by force")
            if not how.get("has_heard_all", True) and deadlines.get(name) is None:
                # It has gone meanwhile. The uid does not fit to a namesake.
                continue
            assert parse_time(deadlines[name]) <= cluster.now, "by force before its grace period is over"
        if was_there and cluster.job_is_gone:
            fired("a job whose time is over")
            assert before.completion_time is not None
            early = timedelta(seconds=abs(self.features["skew"]))
            assert parse_time(before.completion_time) + timedelta(seconds=50) <= cluster.now + early
        if operator.inbox.asked_for_stacks:
            fired("stacks asked for")
        if created:
            self.names_are_late = False
            known = {int(name.partition("-")[0]) for name in cluster.names}
            assert known <= {before.attempt} or self.is_edited, "a name of an earlier attempt resolves"
        if not is_running(before) and is_running(cluster.status):
            fired("a gang that runs")
            workers = {pod["metadata"]["uid"] for pod in self.own_pods() if attempt_of(pod) == before.attempt}
            assert self.names_are_late or self.is_edited or set(cluster.names.values()) == workers, (
                "the names lead to other pods than the workers"
            )
        self.see_what_was_written(listening)
        return done

    @rule(data=st.data(), effects=st.none() | st.integers(0, 6))
    def a_pass_of_the_second_operator_on_what_it_read_long_ago(self, data: st.DataObject, effects: int | None) -> None:
        # No read is older than five minutes.
        oldest = self.cluster.now - timedelta(minutes=5)
        memory = [read for time, read in self.memory if oldest < time <= self.cluster.now] or [self.cluster.picture()]
        read_job = data.draw(st.integers(0, len(memory) - 1), label="job read at")
        read_pods = data.draw(st.integers(read_job, len(memory) - 1), label="pods read at")
        job, _, workloads = decode(memory[read_job])
        seen = job, decode(memory[read_pods])[1], workloads
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
        if before != after:
            parts = self.cluster.job["status"].items()
            assert all(fits(name, encode(part)) for name, part in parts), "a status that the definition refuses"
        broken = [law for law in broken_laws(before, after, created) if not self.excuses(law)]
        assert broken == [], broken
        if not self.is_edited and not self.features["skew"]:
            assert self.ledger.follow(before, after, now) == [], "a budget is overdrawn"
        if not self.is_edited:
            self.nothing_is_shown_that_no_worker_has_said(after)
        self.a_hang_was_long_enough(before, after, listening_since)
        self.what_is_said_to_be_deleted_is_gone(before, after)
        self.count(before, after)
        if after.attempt > before.attempt:
            self.step = self.saved
        self.status = after
        self.memory = [*self.memory, (self.cluster.now, self.cluster.picture())][-LONGEST_MEMORY:]

    def excuses(self, law: str) -> bool:
        """Whether the law asks for what an edited status has lost."""
        return self.is_edited and law in OF_WHOLE_STATUSES

    def what_is_said_to_be_deleted_is_gone(self, before: Status, after: Status) -> None:
        failure = after.last_failure
        if failure is None or failure == before.last_failure or failure.reason != "PodDeleted":
            return
        pod = self.cluster.pods.get(failure.pod)
        is_told = pod is None or failure.pod not in self.hidden or "deletionTimestamp" in pod["metadata"]
        assert is_told, "a worker that runs is said to be deleted"

    def an_unfit_host_is_avoided(self, before: Status, after: Status) -> None:
        """By the very next attempt; other faults must happen twice."""
        failure = after.last_failure
        if failure is None or failure == before.last_failure or failure.reason != "HostUnfit" or is_finished(after):
            return
        if parse_time(failure.time) > self.cluster.now - self.window + timedelta(seconds=abs(self.features["skew"])):
            assert failure.node in after.avoided_nodes
            fired("an unfit host avoided")

    def nothing_is_shown_that_no_worker_has_said(self, status: Status) -> None:
        if progress := status.progress:
            assert (progress.checkpoint_step or 0) <= self.saved
            assert progress.phase is None or progress.step <= self.step

    def a_hang_was_long_enough(self, before: Status, after: Status, listening_since: Any) -> None:
        failure = after.last_failure
        if failure is None or failure == before.last_failure or failure.reason != "NoProgress":
            return
        fired("a restart for a hang" if after.attempt > before.attempt else "a job failed for a hang")
        limit = timedelta(seconds=120 - abs(self.features["skew"]))
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
            kinds = {"SomePodsUnschedulable": "a release", "Resumed": "a resumption"}
            for reason in kinds.keys() & reasons:
                fired(kinds[reason])
        if before.restarts.charged and not after.restarts.charged:
            fired("a refill")
        if after.avoided_nodes and not before.avoided_nodes:
            fired("a node avoided")
        self.an_unfit_host_is_avoided(before, after)
        if after.state is State.BLOCKED:
            fired("a blocked job")

    # What must hold after every step.

    @invariant()
    def workers_are_of_one_attempt_but_for_those_on_lost_nodes(self) -> None:
        running = (pod for pod in self.own_pods() if not scheduler.has_ended(pod))
        left_out = self.late | self.hidden
        counted = (
            pod
            for pod in running
            if not {pod["metadata"]["uid"], pod["metadata"]["name"]} & left_out and not is_lost(pod)
        )
        assert len({attempt_of(pod) for pod in counted}) <= 1

    @invariant()
    def no_worker_is_ahead_of_the_status(self) -> None:
        assert self.is_edited or all(attempt_of(pod) <= self.cluster.status.attempt for pod in self.own_pods())

    @invariant()
    def strangers_are_left_alone(self) -> None:
        assert all(self.cluster.pods.get(name) == pod for name, pod in self.strangers.items())

    # Where everything ends.

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.strangers_leave()
        kubelet.nodes_come_back(self.cluster)
        if not (self.cluster.job_is_gone or is_finished(self.cluster.status)):
            LIMITS[self.features["ends by"]](self)
        self.trouble_is_over()
        self.run_until_quiet()
        if self.cluster.job_is_gone:
            assert (self.own_pods(), self.cluster.pods, self.cluster.others) == ([], {}, {})
            return
        status, job = self.cluster.status, self.cluster.job
        reasons = {condition.reason for condition in status.conditions}
        may_rest = job["spec"]["runPolicy"].get("suspend") or "BudgetExceeded" in reasons
        rests = {State.SUSPENDED} if may_rest else set()
        assert status.state in {State.SUCCEEDED, State.FAILED} | rests | self.other_rests(), ready_message(self.cluster)
        assert self.is_edited or status.observed_generation == job["metadata"]["generation"]
        assert self.active_workers() == [], "workers of a job that has ended"
        if status.state is State.SUCCEEDED and not self.is_edited:
            # Fewer than before, if a user deleted some.
            assert {attempt_of(pod) for pod in self.own_pods() if not is_kept(pod, status)} <= {status.attempt}
        if status.state is State.SUSPENDED:
            assert self.own_pods() == []

    def trouble_is_over(self) -> None:
        """What nobody but its author can put right."""

    def other_rests(self) -> set[State]:
        return set()

    def active_workers(self) -> list[Object]:
        return [pod for pod in self.own_pods() if not scheduler.has_ended(pod)]

    # What binds every job that has begun, whatever was done to it.

    def goes_on(self, seconds: int) -> Iterator[int]:
        """Nothing goes wrong and no worker ends. Yields the seconds between two moments; workers that run in the second
        ran all the time."""
        while seconds > 0:
            done = self.work(0)
            self.kubelets_work()
            step = int(min(seconds, max(1.0, (done.again or LONGEST_STEP).total_seconds()), 60))
            self.cluster.now += timedelta(seconds=step)
            seconds -= step
            yield step

    @property
    def skewed(self) -> int:
        """Seconds that an operator whose clock is ahead may have accounted before they passed, as what was then. Until
        they have passed for the others, these account nothing: if they went back, the same seconds would count again at
        every change of operator, without a bound. Real operators have the API server's clock."""
        return abs(self.features["skew"])

    def a_budget_ends_it(self) -> None:
        self.cluster.edit_run_policy(budget={"chipHours": 1}, suspend=False)
        used = 0
        for seconds in self.goes_on(2000):
            used += seconds * 4 * sum("nodeName" in pod["spec"] for pod in self.active_workers())
        assert used <= 3600 + (120 + self.skewed) * 16, f"{used} chip-seconds of a budget of one chip-hour"

    def a_deadline_ends_it(self) -> None:
        self.cluster.edit_run_policy(activeDeadlineSeconds=200, suspend=False)
        ready = 0
        for seconds in self.goes_on(900):
            ready += seconds * any(kubelet.runs(pod) for pod in self.active_workers())
        assert ready <= 200 + 4 * 60 + self.skewed, f"workers ran for {ready} s, and the deadline is 200 s"

    def the_user_suspends_it(self) -> None:
        self.cluster.edit_run_policy(suspend=True)
        for _ in self.goes_on(900):
            pass
        assert self.active_workers() == [], "workers of a suspended job"

    def nothing_ends_it(self) -> None:
        pass

    def run_until_quiet(self) -> None:
        """Until nothing changes and nothing is due. From then on no pass does anything, however late."""
        quiet = 0
        for _ in range(MOST_PASSES):
            before = self.cluster.picture()
            done = self.work(0)
            assert done.error is None or self.cluster.job_is_gone, done.error
            # The gang of a job that cannot be read may have begun to run unseen.
            if is_running(self.cluster.status) or self.cluster.status.state is State.INVALID:
                self.all_pods_finish_well()
            self.kubelets_work()
            self.cluster.now += done.again or timedelta(0)
            quiet = quiet + 1 if self.cluster.picture() == before else 0
            # Looks again and again at what only an administrator can put right.
            is_helpless = self.cluster.status.state in self.other_rests() and quiet > LOOKS_AT_REST
            if quiet and (done.again is None or is_helpless):
                break
        else:
            raise AssertionError(f"the operator does not come to rest: {ready_message(self.cluster)}, {done}")
        if self.is_edited:
            # The other operator may have heard a report that was removed from the status.
            self.work(1)
        for later in (0, 600, 10**6):
            self.cluster.now += timedelta(seconds=later)
            assert [self.work(which).effects for which in (0, 1)] == [[], []], "it does something at rest"


LIMITS: dict[str, Callable[[Gang], None]] = {
    "nothing": Gang.nothing_ends_it,
    "a budget": Gang.a_budget_ends_it,
    "a deadline": Gang.a_deadline_ends_it,
    "a suspension": Gang.the_user_suspends_it,
}


@lru_cache(10_000)
def fits(name: str, part: bytes) -> bool:
    """Returns whether the definition allows this part of a status. Most parts stay when another changes."""
    return name not in _PARTS or _PARTS[name].is_valid(decode(part))


def has_turned(before: Status, after: Status) -> bool:
    """Whether an attempt has begun, or the job was suspended or has ended."""
    if after.attempt != before.attempt or is_finished(after):
        return True
    return is_true(after.conditions, ConditionType.SUSPENDED) and not is_true(
        before.conditions, ConditionType.SUSPENDED
    )


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
