"""What happens around a gang, as rules of a hypothesis state machine: nodes, workers, users, the clock.

`test_machine` adds the operators, and what must hold.
"""

from abc import abstractmethod
from datetime import timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.planner import kubelet
from tests.planner.laws import is_finished
from tests.planner.mishaps import ENDINGS, LOSSES, STARTS, Mishap, fired
from tests.planner.model_cluster import ModelCluster, copied
from tests.planner.operators import Operator
from tests.planner.scheduler import place_all
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.job.naming import WorkerId, is_placeholder
from tpu_training_operator.kube.cluster import Object


class Surroundings(RuleBasedStateMachine):
    """`strangers`: pods of other owners, by name. `step`, `saved`: how far the training really is, and how far its last
    checkpoint."""

    cluster: ModelCluster
    operators: list[Operator]
    nodes: list[str]
    strangers: dict[str, Object]
    status: Status
    step: int
    saved: int

    @abstractmethod
    def begin_to_watch(self) -> None:
        """A new job, which no operator has seen."""

    @abstractmethod
    def a_pass(self, which: int, order: int) -> None:
        """One pass of the operator with this index, with effects in this order."""

    def own_pods(self) -> list[Object]:
        return [
            pod
            for name, pod in sorted(self.cluster.pods.items())
            if name not in self.strangers and not self.cluster.is_orphan(pod) and not is_placeholder(name, "digits")
        ]

    # What happens to pods and nodes.

    @rule(data=st.data(), ways=st.permutations(sorted(ENDINGS)))
    def workers_end(self, data: st.DataObject, ways: list[str]) -> None:
        """Each ends in its own way, and the operator must find out which was first."""
        self.there_is_a_gang_again()
        for how in ways[:2]:
            self.befalls(data, how, ENDINGS[how])

    @rule(data=st.data(), ways=st.permutations(sorted(STARTS)))
    def pods_begin(self, data: st.DataObject, ways: list[str]) -> None:
        for how in ways:
            self.a_pass(which=0, order=0)
            self.befalls(data, how, STARTS[how])

    @rule(data=st.data(), ways=st.permutations(sorted(LOSSES)), again=st.sampled_from([True, True, False]))
    def pods_are_lost(self, data: st.DataObject, ways: list[str], again: bool) -> None:
        if again:
            self.there_is_a_gang_again()
        for how in ways[:2]:
            self.befalls(data, how, LOSSES[how])

    def there_is_a_gang_again(self) -> None:
        """Otherwise half of what befalls a gang would meet a job that is over."""
        if self.cluster.job_is_gone or is_finished(self.status):
            self.the_user_applies_the_job_again()
        self.all_goes_well_for_a_while(2, which=0)

    def befalls(self, data: st.DataObject, name: str, mishap: Mishap) -> None:
        if pods := self.own_pods():
            before, lost = copied(self.cluster.pods), set(self.cluster.lost)
            mishap(self.cluster, self.cluster.pods[data.draw(st.sampled_from(names_of(pods)))])
            if (before, lost) != (self.cluster.pods, self.cluster.lost):
                fired(name)

    @rule(nodes=st.lists(st.sampled_from(["node-0", "node-0", "node-1"]), min_size=2, max_size=3))
    def chips_fail(self, nodes: list[str]) -> None:
        for node in nodes:
            self.all_goes_well_for_a_while(3, which=0)
            for pod in self.own_pods():
                if pod["spec"].get("nodeName") == node:
                    kubelet.find_chips_busy(self.cluster, pod)
                    fired("chips busy")

    @rule(which=st.integers(0, 1))
    def only_one_worker_finds_a_node(self, which: int) -> None:
        if waiting := [pod for pod in self.own_pods() if "nodeName" not in pod["spec"]]:
            place_all(self.cluster, self.nodes, [waiting[0]])
            self.nothing_is_heard_for_minutes(which)

    @rule()
    def kubelets_work(self) -> None:
        kubelet.sweep(self.cluster)
        self.cluster.collect_garbage()
        place_all(self.cluster, self.nodes, [pod for pod in self.own_pods() if self.has_nodes_for(pod)])
        for pod in self.own_pods():
            if "nodeName" in pod["spec"]:
                kubelet.make_ready(self.cluster, pod)

    def has_nodes_for(self, pod: Object) -> bool:
        return True

    @precondition(lambda self: self.cluster.lost)
    @rule()
    def nodes_come_back(self) -> None:
        fired("nodes back")
        kubelet.nodes_come_back(self.cluster)

    @rule(sure=st.integers(0, 5))
    def the_training_is_over(self, sure: int) -> None:
        """Rare, because long lives find more."""
        if sure == 0:
            self.all_pods_finish_well()

    def all_pods_finish_well(self) -> None:
        for pod in self.own_pods():
            kubelet.end(self.cluster, pod)

    @rule(
        to=st.integers(0, 1),
        phases=st.permutations(ReportPhase),
        steps=st.integers(0, 50),
        stacks=st.sampled_from([None, "Thread 1: in step"]),
    )
    def the_first_worker_reports(self, to: int, phases: list[ReportPhase], steps: int, stacks: str | None) -> None:
        self.all_goes_well_for_a_while(2, which=to)
        for phase in phases[:3]:
            self.step += steps
            self.report(to, phase, stacks=stacks)
            self.a_pass(which=to, order=0)
            self.cluster.now += timedelta(seconds=10)

    @rule(to=st.integers(0, 1))
    def a_checkpoint_is_saved(self, to: int) -> None:
        self.all_goes_well_for_a_while(4, which=to)
        self.saved = self.step = self.step + 10
        self.report(to, ReportPhase.TRAINING)
        self.a_pass(which=to, order=0)

    def report(self, to: int, phase: ReportPhase, stacks: str | None = None) -> None:
        inboxes = self.operators[to].inboxes
        if inboxes is not None and kubelet.reporter(self.cluster) is not None:
            checkpoint = self.saved or None
            kubelet.report(self.cluster, self.step, phase, to=inboxes, checkpoint_step=checkpoint, stacks=stacks)
            fired(f"report: {phase}")

    # What users do.

    @rule(
        fields=st.sampled_from(
            [
                *({"suspend": True}, {"suspend": True}, {"suspend": False}, {"suspend": False}, {}),
                *({"activeDeadlineSeconds": 200}, {"activeDeadlineSeconds": 100_000}),
                *({"budget": {"chipHours": 1}}, {"budget": {"chipHours": 1, "onExceeded": "Fail"}}),
                *({"budget": {"chipHours": 10**5}}, {"budget": {"chipHours": 10**5}}),
                *({"ttlSecondsAfterFinished": 50}, {"ttlSecondsAfterFinished": 100_000}),
            ]
        )
    )
    def the_user_edits_the_run_policy(self, fields: dict[str, Any]) -> None:
        if not self.cluster.job_is_gone:
            self.cluster.edit_run_policy(**fields)

    @precondition(lambda self: self.is_at_rest())
    @rule(gibibytes=st.integers(8, 11), resumes=st.booleans())
    def the_user_changes_the_workers(self, gibibytes: int, resumes: bool) -> None:
        """As far as the API server allows it."""
        self.cluster.edit_trainer(resources={"limits": {"memory": f"{gibibytes}Gi"}})
        if resumes:
            self.cluster.edit_run_policy(suspend=False)
        fired("other workers")

    def is_at_rest(self) -> bool:
        suspends = self.cluster.job["spec"].get("runPolicy", {}).get("suspend")
        is_stopped = self.status.state is State.SUSPENDED and is_true(self.status.conditions, ConditionType.READY)
        return bool(suspends and is_stopped and not self.cluster.job_is_gone)

    @rule(sure=st.integers(0, 7), again=st.sampled_from([True, True, False]))
    def the_user_deletes_the_job(self, sure: int, again: bool) -> None:
        """Rarely."""
        if self.cluster.job_is_gone or sure:
            return
        self.cluster.job_is_gone = True
        fired("a job deleted")
        if again:
            self.the_user_applies_the_job_again()

    @precondition(lambda self: self.cluster.job_is_gone or is_finished(self.status))
    @rule()
    def the_user_applies_the_job_again(self) -> None:
        self.cluster.apply_again()
        fired("a job applied again")
        self.begin_to_watch()

    @rule(takes=st.sampled_from([False, False, True]))
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

    # Time.

    @rule(seconds=st.integers(-300, 500))
    def time_passes_or_the_clock_is_set_back(self, seconds: int) -> None:
        self.cluster.now += timedelta(seconds=seconds)
        if seconds < 0:
            fired("the clock set back")

    @rule(passes=st.integers(1, 6), which=st.integers(0, 1))
    def all_goes_well_for_a_while(self, passes: int, which: int) -> None:
        for _ in range(passes):
            self.kubelets_work()
            self.a_pass(which=which, order=0)
            self.cluster.now += timedelta(seconds=60)

    @rule(which=st.integers(0, 1))
    def nothing_is_heard_for_minutes(self, which: int) -> None:
        for _ in range(4):
            self.a_pass(which=which, order=0)
            self.cluster.now += timedelta(seconds=50)


def names_of(pods: list[Object]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]
