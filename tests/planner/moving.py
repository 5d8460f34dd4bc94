"""A job that moves: slices have nodes for a while and then have none.

What must hold at every moment: all workers of an attempt are on one slice, the one that the status names; the attempt
and its slice are written together; every attempt trains with the same global batch; and placeholders exist only while
they are of use. A model of the trainer counts the examples: those of all checkpoints together are the budget when the
job has succeeded, and none is trained again after the step that was restored.

Jobs on two slices may run on one of them. Some jobs go up a ladder before: their lower rungs run on their own
slice only, and what follows is as in a job without one.
"""

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.planner import kubelet
from tests.planner.gang import Gang, attempt_of
from tests.planner.laws import is_finished
from tests.planner.mishaps import Mishap, fired
from tests.planner.model_trainer import ModelTrainer
from tpu_training_operator.api.constants import LABEL_ALTERNATIVE, LABEL_SLICE_INDEX
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.job.naming import is_placeholder
from tpu_training_operator.kube.cluster import Object

PLACEMENT = {
    "alternatives": [
        {"slice": {"acceleratorType": "v4-16"}, "waitForPreviousSeconds": 120},
        {"slice": {"acceleratorType": "v5litepod-16"}, "waitForPreviousSeconds": 180},
    ],
    "returnToPreferred": "AtCheckpoint",
    "minRunSeconds": 60,
}
# Of the job's own slices how many can be had, and which of its alternatives.
ALL_FREE = (2, frozenset({0, 1}))
SOME_FREE = [(0, frozenset({0})), (0, frozenset({1})), (0, frozenset({0, 1})), (1, frozenset[int]()), (1, {0})]
# As large as the job, or as one of its slices: a rung is known by its number, not by its name.
LOWER_RUNG = {"slice": {"acceleratorType": "v5litepod-8"}, "steps": 20}
MEASURED = {
    "firstLoss": 2.0,
    "lastLoss": 1.0,
    "averaged": 5,
    "errorsFallen": 9.0,
    "recompilations": 0,
    "notFinite": 0,
    "findings": {},
}


class MovingGang(Gang):
    @property
    def moves(self) -> bool:
        return bool(self.features["moves"])

    def prepare(self) -> None:
        super().prepare()
        self.free: tuple[int, Any] = ALL_FREE
        self.first = 1
        if not self.moves:
            return
        spec = self.cluster.job["spec"]
        spec["placement"], spec["checkpoint"] = {**PLACEMENT}, {"uri": "gs://bucket/jobs"}
        # The numbers that the alternatives have in the order of preference begin at `first`.
        if spec["slice"]["count"] == 2:
            spec["placement"]["count"] = {"min": 1, "waitForPreviousSeconds": 120}
            self.first = 2
        if "entrypoint" in spec["trainer"] and self.features["climbs"]:
            spec["ladder"] = {"rungs": [LOWER_RUNG]}

    def begin_to_watch(self) -> None:
        self.slices: dict[int, tuple[int, str]] = {}
        self.trainer = ModelTrainer()
        # Attempts of which a worker has ended well before the training was over.
        self.liars: set[int] = set()
        super().begin_to_watch()

    @precondition(lambda self: self.moves)
    @rule(own=st.integers(0, 2), others=st.sets(st.integers(0, 1)))
    def the_capacity_changes(self, own: int, others: set[int]) -> None:
        self.free = own, others

    @precondition(lambda self: self.moves)
    @rule(free=st.sampled_from(SOME_FREE), which=st.integers(0, 1))
    def the_slice_is_lost_for_a_while(self, free: tuple[int, Any], which: int) -> None:
        self.free = free
        for pod in self.own_pods():
            if not self.has_nodes_for(pod):
                kubelet.lose_node_for_good(self.cluster, pod)
        self.all_goes_well_for_a_while(6, which)

    @precondition(lambda self: self.moves)
    @rule(which=st.integers(0, 1))
    def all_slices_are_free_for_a_while(self, which: int) -> None:
        self.free = ALL_FREE
        kubelet.nodes_come_back(self.cluster)
        self.a_checkpoint_is_saved(which)
        self.all_goes_well_for_a_while(4, which)

    @precondition(lambda self: self.moves)
    @rule(steps=st.integers(1, 200), saves=st.booleans(), which=st.integers(0, 1))
    def the_gang_trains(self, steps: int, saves: bool, which: int) -> None:
        self.all_goes_well_for_a_while(2, which)
        attempt = self.cluster.status.attempt
        if self.is_edited:
            return
        if self.trainer.trains(self.cluster, attempt, self.running(attempt), steps) and saves:
            self.trainer.saves(attempt)
            fired("examples saved")

    def all_pods_finish_well(self) -> None:
        """A lower rung measures; the job itself trains what is left."""
        attempt = self.cluster.status.attempt
        if not self.moves or ((self.is_edited or self.is_unreadable) and str(self.cluster.status.ladder) != "1/2"):
            super().all_pods_finish_well()
        elif str(self.cluster.status.ladder) == "1/2":
            falls = self.cluster.now.minute % 4 != 0
            message = {"outcome": "Succeeded", "message": "", "rung": MEASURED | ({} if falls else {"lastLoss": 2.0})}
            for pod in self.running(attempt):
                kubelet.end(self.cluster, pod, message=json.dumps(message))
        elif self.trainer.trains(self.cluster, attempt, self.running(attempt)):
            self.trainer.saves(attempt)
            super().all_pods_finish_well()
            fired("trained to the end")

    def befalls(self, data: st.DataObject, name: str, mishap: Mishap) -> None:
        if name in ("exit code 0", "exit without a message"):
            self.liars.add(self.cluster.status.attempt)
        super().befalls(data, name, mishap)

    def running(self, attempt: int) -> list[Object]:
        """Those workers of the attempt that train, even if they are asked to stop."""
        return [
            pod
            for pod in self.own_pods_of(attempt)
            if pod["status"]["phase"] == "Running" and not kubelet.is_lost(self.cluster, pod) and not self.is_late(pod)
        ]

    @precondition(lambda self: self.moves)
    @rule(lost=st.booleans())
    def the_placement_is_lost_from_the_status(self, lost: bool) -> None:
        """By somebody who edits it. The workers know where they are."""
        status = self.cluster.job.get("status") or {}
        is_over = self.cluster.job_is_gone or is_finished(self.status)
        if lost and "placement" in status and not is_over and self.own_pods_of(self.status.attempt):
            del status["placement"]
            self.cluster.touch(self.cluster.job)
            self.status = self.cluster.status
            fired("a placement lost")

    @rule()
    def kubelets_work(self) -> None:
        super().kubelets_work()
        for pod in self.held():
            if self.has_nodes_for(pod):
                kubelet.place(self.cluster, pod, f"held-by-{pod['metadata']['name']}")
                kubelet.make_ready(self.cluster, pod)

    def has_nodes_for(self, pod: Object) -> bool:
        """A lower rung, which is small, always finds some."""
        own, others = self.free
        number = alternative_of(pod)
        if number < self.first:
            return int(pod["metadata"]["labels"][LABEL_SLICE_INDEX]) < own
        return number - self.first in others or number > 100

    def held(self) -> list[Object]:
        return [pod for name, pod in self.cluster.pods.items() if is_placeholder(name, "digits")]

    def own_pods_of(self, attempt: int) -> list[Object]:
        return [pod for pod in self.own_pods() if attempt_of(pod) == attempt]

    def count(self, before: Status, after: Status) -> None:
        super().count(before, after)
        if not self.moves or self.is_edited or self.is_unreadable or after.placement is None or after.attempt == 0:
            return
        if after.state is State.SUCCEEDED and before.state is not State.SUCCEEDED and after.attempt not in self.liars:
            assert sum(end - begin for begin, end in self.trainer.kept) == self.budget, "not the budget"
            fired("the budget trained")
        stages = [str(stage.verdict) for stage in after.rungs]
        if stages != [str(stage.verdict) for stage in before.rungs] and stages:
            fired(f"a rung {stages[0]}")
        known = self.slices.setdefault(after.attempt, (after.placement.option_index, after.placement.slice))
        assert known == (after.placement.option_index, after.placement.slice), "two slices for one attempt"
        assert after.placement.option_index > 100 or after.resolved.global_batch_size == self.batch, "another batch"
        times, _, words = after.placement.slice.rpartition(" x ")
        found = after.resolved.accelerator_type, after.resolved.slices
        assert found == (words, int(times or 1)), "the numbers of another slice"
        assert (after.placement.option_index > 100) == (str(after.ladder) == "1/2"), (
            "a job on the slice of a lower rung"
        )
        if after.attempt > before.attempt and after.placement.moves:
            fired(f"a move: {after.placement.moves[-1].reason}")
            fired("fewer slices" if 0 < after.placement.option_index < self.first else "other slices")

    @property
    def budget(self) -> int:
        """In examples."""
        return self.batch * int(self.cluster.job["spec"]["recipe"]["trainSteps"])

    @property
    def batch(self) -> int:
        """Of spec.slice: the recipe has no other, so it is tuned there."""
        return int(self.cluster.job["spec"]["recipe"]["globalBatchSize"])

    @invariant()
    def all_workers_of_an_attempt_are_on_the_slice_that_its_status_names(self) -> None:
        placement = self.cluster.status.placement
        workers = [pod for pod in self.own_pods_of(self.cluster.status.attempt) if not self.is_late(pod)]
        found = {alternative_of(pod) for pod in workers}
        assert len(found) <= 1
        assert self.is_edited or placement is None or found <= {placement.option_index}

    def is_late(self, pod: Object) -> bool:
        return pod["metadata"]["uid"] in self.late

    def trouble_is_over(self) -> None:
        super().trouble_is_over()
        self.free = ALL_FREE

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "cluster"):
            assert self.held() == [], "placeholders of a job that has ended or rests"


def alternative_of(pod: Object) -> int:
    return int(pod["metadata"]["labels"].get(LABEL_ALTERNATIVE, "0"))
