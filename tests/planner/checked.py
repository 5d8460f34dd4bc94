"""A job whose code is checked before it begins.

What must hold at every moment: the first attempt begins only after the check is over, and an error of the user's lets
none begin; what is decided stays so; and no pass on current news creates the pod of a check that is over.
"""

import json
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.planner import kubelet
from tests.planner.gang import Gang, named
from tests.planner.mishaps import fired
from tests.planner.operators import Pass
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.status import Status
from tpu_training_operator.kube.cluster import Object

POD = "digits-entry-check"
_WORDS = json.dumps({"outcome": "UserError", "message": "NameError: name 'lern' is not defined"})
PASSED = json.dumps({"outcome": "Succeeded", "message": "made 2 steps"})
_COMPILED = {"outcome": "Succeeded", "message": "made 2 steps"}
_TOO_LARGE = json.dumps(_COMPILED | {"compiled": {"fits": False, "memory": {"needed": 2**35, "limit": 2**34}}})
_UNFINISHED = json.dumps(_COMPILED | {"compiled": {"trouble": "Unfinished"}})
WAYS = {
    "the check passes": partial(kubelet.end, message=PASSED),
    "the check finds an error": partial(kubelet.end, code=1, message=_WORDS),
    "the check is out of memory": partial(kubelet.end, code=137, reason="OOMKilled"),
    "the step is too large": partial(kubelet.end, message=_TOO_LARGE),
    "the check is out of memory while it compiles": partial(
        kubelet.end, code=137, reason="OOMKilled", message=_UNFINISHED
    ),
    "the check is not in the image": partial(kubelet.end, code=1, message="No module named tpu_trainer"),
    "the check's pod is deleted": kubelet.delete_by_hand,
    "the check's pod vanishes": kubelet.vanish,
    "the check's image is not found": kubelet.find_no_image,
    "the check's node shuts down": kubelet.shut_down,
    "the check's node is lost": kubelet.lose_node_for_good,
    "the check waits": lambda *_: None,
}


class CheckedGang(Gang):
    is_slow = False

    @property
    def is_checked(self) -> bool:
        return bool(self.features["is checked"])

    def prepare(self) -> None:
        super().prepare()
        if self.is_checked:
            self.cluster.job["spec"]["entryCheck"] = {"mode": "Auto"}

    def own_pods(self) -> list[Object]:
        """The workers."""
        return [pod for pod in super().own_pods() if pod["metadata"]["name"] != POD]

    def check_pod(self) -> Object | None:
        pod = self.cluster.pods.get(POD)
        return None if pod is None or self.cluster.is_orphan(pod) else pod

    @property
    def is_own_loop(self) -> bool:
        return "command" in self.cluster.job["spec"]["trainer"]

    @precondition(lambda self: self.is_checked and not self.is_own_loop)
    @rule(ways=st.permutations(sorted(WAYS)), starts=st.sampled_from([True, True, False]))
    def checks_fare(self, ways: list[str], starts: bool) -> None:
        """That of this job, and of the next ones of its name."""
        for way in ways[:6]:
            status, pod = self.cluster.status, self.check_pod()
            has_ended = pod is not None and pod["status"]["phase"] in ("Succeeded", "Failed")
            if self.cluster.job_is_gone or status.attempt or status.completion_time or has_ended:
                self.cluster.apply_again()
                self.begin_to_watch()
            self.is_slow = True
            for _ in range(3):
                self.kubelets_work()
                self.a_pass(which=0, order=0)
            self.is_slow = False
            if (pod := self.check_pod()) is not None:
                self.befalls_check(pod, way, starts)
            self.a_pass(which=0, order=0)

    def befalls_check(self, pod: Object, way: str, starts: bool) -> None:
        if starts:
            kubelet.start(self.cluster, pod)
        else:
            pod["status"] = {"phase": "Pending"}
            pod["spec"].pop("nodeName", None)
        before = json.dumps(pod)
        WAYS[way](self.cluster, pod)
        if POD not in self.cluster.pods or before != json.dumps(pod) or way == "the check waits":
            fired(way)

    @precondition(lambda self: self.is_checked)
    @rule(entry=st.sampled_from(["Auto", "Require", "Skip"]))
    def the_user_edits_the_entry_check(self, entry: str) -> None:
        if not self.cluster.job_is_gone:
            # A loop of the user's own cannot be required to be checked, and `careless` tries that.
            self.cluster.job["spec"]["entryCheck"] = {"mode": "Auto" if self.is_own_loop else entry}
            self.cluster.edit_run_policy()

    @rule()
    def kubelets_work(self) -> None:
        super().kubelets_work()
        if (pod := self.check_pod()) is not None:
            if pod["metadata"].get("deletionTimestamp") is None:
                kubelet.start(self.cluster, pod)
            if not self.is_slow:
                kubelet.end(self.cluster, pod, message=PASSED)

    def work(self, which: int, **how: Any) -> Pass:
        before, entry = self.cluster.status, self.cluster.job["spec"]["entryCheck"].get("mode")
        # A job that is in its queue already is not checked any more.
        has_workload = bool(self.cluster.workloads())
        done = super().work(which, **how)
        if not self.is_checked or self.is_edited:
            return done
        if POD in named(done, "create Pod/"):
            assert checked(before) == "Unknown", "a check that is over is made again"
            fired("a check")
        after = self.cluster.status
        if after.attempt > before.attempt == 0 and not self.cluster.job_is_gone:
            assert checked(before) != "Unknown", "it begins before the check is over"
            assert has_workload or checked(before) is not None or entry == "Skip" or self.is_own_loop, (
                "it begins without a check"
            )
        return done

    def see_what_was_written(self, listening_since: Any) -> None:
        before, after = self.status, self.cluster.status
        if not self.is_edited:
            self.what_is_checked_stays_so(before, after)
        super().see_what_was_written(listening_since)

    def what_is_checked_stays_so(self, before: Status, after: Status) -> None:
        if checked(before) in ("True", "False"):
            assert checked(after) == checked(before), "what was decided is decided again"
        if reason_of(after) in ("EntryFailed", "StepTooLarge"):
            assert after.attempt == 0, "a job of which the check found an error has begun"
            assert self.own_pods() == []
            assert after.completion_time is not None
            fired("a job that the check has failed")
        if reason_of(after) != reason_of(before):
            fired(f"EntryCheckPassed: {reason_of(after)}")

    def run_until_quiet(self) -> None:
        super().run_until_quiet()
        pod = self.check_pod()
        assert pod is None or pod["status"]["phase"] in ("Succeeded", "Failed"), "the check of a job at rest"


def checked(status: Status) -> str | None:
    found = find(status.conditions, ConditionType.ENTRY_CHECK_PASSED)
    return None if found is None else found.status


def reason_of(status: Status) -> str:
    found = find(status.conditions, ConditionType.ENTRY_CHECK_PASSED)
    return "" if found is None else found.reason
