"""A careless administrator: he edits every field that the API server lets him edit, edits the status, wipes it or
restores an old one, hides workers, and loses conditions of Workloads. The job itself may become unreadable, as after an
upgrade of the operator whose rules are stricter.

Laws about what the status knew are not for such a job (`is_edited`). But never do two gangs run, no quota is given back
while its chips are used, nothing is said to be deleted that runs, budget, deadline, suspension and eviction bind every
job, and each comes to its end or to rest.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.planner import kueue
from tests.planner.api_server import accepts
from tests.planner.gang import LIMITS, Gang
from tests.planner.laws import is_finished
from tests.planner.mishaps import fired
from tests.planner.model_cluster import copied
from tests.planner.queued import QueuedGang
from tests.planner.surroundings import names_of
from tpu_training_operator.api.constants import LABEL_JOB_NAME, LABEL_QUEUE
from tpu_training_operator.api.status import State
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.encoding import decode

# Of the spec, by path.
EDITS: list[tuple[str, Any]] = [
    *(("entryCheck.mode", value) for value in ("Auto", "Require", "Skip")),
    *(("entryCheck.compile", value) for value in ("Auto", "Require", "Skip")),
    *(("entryCheck.dataInRegion", value) for value in ("Warn", "Require", "Ignore")),
    *(("entryCheck.deadlineSeconds", 1), ("entryCheck.resources", {"limits": {"cpu": "1"}})),
    *(("runPolicy.startDeadlineSeconds", 1), ("runPolicy.progressDeadlineSeconds", 10**6)),
    *(("placement.onLoss", "Wait"), ("placement.minRunSeconds", 1), ("placement.maxMoves", {"count": 1})),
    *(("placement.placeholderPriorityClass", "none"),),
]
# What an upgrade may no longer read.
UNREADABLE: list[tuple[str, Any]] = [
    *(("recipe.globalBatchSize", 127), ("slice.acceleratorType", "v99-8"), ("recipe", {})),
    *(("trainer.image", 3), ("entryCheck.mode", "Sometimes"), ("runPolicy.restart", "always")),
]
LOST = ("Admitted", "Suspended", "GangReady", "EntryCheckPassed", "Ready", "Succeeded", "Failed")


class CarelessGang(QueuedGang):
    is_unreadable = False
    # The spec before it became unreadable.
    whole: Object

    def begin_to_watch(self) -> None:
        if self.is_unreadable:
            self.the_next_upgrade_reads_it_again()
        for name in getattr(self, "hidden", ()):
            # Those of the job before.
            self.cluster.pods.pop(name, None)
        super().begin_to_watch()

    def may_be_edited(self) -> bool:
        return bool(self.features["is careless"]) and not self.cluster.job_is_gone

    @precondition(may_be_edited)
    @rule(edit=st.sampled_from(EDITS))
    def a_field_is_edited(self, edit: tuple[str, Any]) -> None:
        job = copied(self.cluster.job)
        path, value = edit
        if path.startswith("placement") and "placement" not in job["spec"]:
            return
        put(job["spec"], path, value)
        if accepts(self.cluster.job, job):
            self.cluster.job["spec"] = job["spec"]
            self.cluster.edit_run_policy()
            fired("a field edited")

    @precondition(may_be_edited)
    @rule(part=st.sampled_from(UNREADABLE))
    def an_upgrade_no_longer_reads_the_job(self, part: tuple[str, Any]) -> None:
        if self.is_unreadable or is_finished(self.status):
            return
        self.is_unreadable, self.whole = True, copied(self.cluster.job["spec"])
        put(self.cluster.job["spec"], *part)
        self.cluster.touch(self.cluster.job)
        fired("a job that cannot be read")

    @precondition(lambda self: self.is_unreadable)
    @rule()
    def the_next_upgrade_reads_it_again(self) -> None:
        policy = self.cluster.job["spec"].get("runPolicy") or {}
        restart = self.whole["runPolicy"]["restart"]
        self.cluster.job["spec"] = {**self.whole, "runPolicy": {**policy, "restart": restart}}
        self.cluster.touch(self.cluster.job)
        self.is_unreadable = False

    @precondition(may_be_edited)
    @rule(back=st.integers(1, 30), which=st.integers(0, 1))
    def a_backup_of_the_status_is_restored(self, back: int, which: int) -> None:
        old = decode(self.memory[-min(back, len(self.memory))][1])[0]
        if old["metadata"]["uid"] != self.cluster.uid:
            return
        before = self.status.attempt
        self.edit_status(old.get("status") or {})
        if self.status.attempt < before:
            fired("an attempt restored")

    @precondition(may_be_edited)
    @rule(sure=st.integers(0, 2))
    def the_status_is_wiped(self, sure: int) -> None:
        if sure == 0:
            self.edit_status({})
            fired("a status wiped")

    @precondition(may_be_edited)
    @rule(kind=st.sampled_from(LOST))
    def a_condition_is_lost(self, kind: str) -> None:
        status = copied(self.cluster.job.get("status") or {})
        conditions = status.get("conditions", [])
        kept = [condition for condition in conditions if condition["type"] != kind]
        if len(kept) < len(conditions):
            self.edit_status({**status, "conditions": kept})
            fired("a condition lost")

    @precondition(may_be_edited)
    @rule(name=st.sampled_from(["progress", "goodput", "placement", "resolved", "completionTime", "restarts"]))
    def a_part_of_the_status_is_lost(self, name: str) -> None:
        status = copied(self.cluster.job.get("status") or {})
        if status.pop(name, None) is not None:
            self.edit_status(status)

    def edit_status(self, status: Object) -> None:
        if status != self.cluster.job.get("status"):
            self.cluster.job["status"] = status
            self.cluster.touch(self.cluster.job)
            self.status, self.is_edited = self.cluster.status, True

    def edit(self, **metadata: Any) -> None:
        if not metadata.items() <= self.cluster.job["metadata"].items():
            self.cluster.job["metadata"] |= metadata
            self.cluster.touch(self.cluster.job)

    @precondition(lambda self: self.may_be_edited() and self.is_queued)
    @rule(kind=st.sampled_from(["Admitted", "QuotaReserved", "Evicted", "PodsReady", "Requeued"]))
    def a_condition_of_the_workload_is_lost(self, kind: str) -> None:
        found = kueue.workload(self.cluster)
        if found is not None:
            kept = [each for each in found["status"].get("conditions", ()) if each["type"] != kind]
            found["status"]["conditions"] = kept
            self.cluster.touch(found)
            self.is_robbed = self.is_edited = True

    @precondition(lambda self: self.may_be_edited() and self.is_queued)
    @rule(queue=st.sampled_from(["", "elsewhere"]))
    def the_queue_is_taken_from_the_job(self, queue: str) -> None:
        self.edit(labels={LABEL_QUEUE: queue} if queue else {})

    @precondition(may_be_edited)
    @rule(data=st.data(), what=st.sampled_from(["label", "owner"]))
    def a_worker_is_hidden(self, data: st.DataObject, what: str) -> None:
        if not (pods := self.active_workers()):
            return
        metadata = self.cluster.pods[data.draw(st.sampled_from(names_of(pods)))]["metadata"]
        if what == "label":
            metadata["labels"].pop(LABEL_JOB_NAME, None)
        else:
            metadata["ownerReferences"] = []
        self.hidden.add(metadata["name"])
        fired(f"a worker without its {what}")

    @precondition(lambda self: self.may_be_edited() and not is_finished(self.status))
    @rule(sure=st.integers(0, 5))
    def the_job_is_deleted_and_a_finalizer_keeps_it(self, sure: int) -> None:
        if sure == 0:
            deleted = format_time(self.cluster.now)
            self.edit(deletionTimestamp=deleted, finalizers=["example.com/audit"])
            for _ in self.goes_on(300):
                pass
            assert self.active_workers() == [], "workers of a job that is being deleted"
            self.cluster.job["metadata"].pop("deletionTimestamp")
            self.cluster.job["metadata"].pop("finalizers")
            self.cluster.job_is_gone = True
            fired("a finalizer on the job")
            self.the_user_applies_the_job_again()

    def own_pods(self) -> list[Object]:
        return [pod for pod in super().own_pods() if pod["metadata"]["name"] not in self.hidden]

    # Where everything ends.

    def trouble_is_over(self) -> None:
        super().trouble_is_over()
        for name in self.hidden:
            self.cluster.pods.pop(name, None)
        self.hidden = set()
        if self.is_queued and not self.cluster.job_is_gone:
            self.edit(labels={**kueue.QUEUE})
            kueue.mends(self.cluster)
        if self.is_unreadable and self.features["is readable in the end"]:
            self.the_next_upgrade_reads_it_again()

    def other_rests(self) -> set[State]:
        # A Workload that says it has finished is only for an administrator to delete.
        edited = {State.BLOCKED} if self.is_edited and self.is_queued else set()
        return {State.INVALID, State.SUSPENDED} | edited if self.is_unreadable else edited


def put(spec: Any, path: str, value: Any) -> None:
    *above, last = path.split(".")
    for part in above:
        if not isinstance(spec.get(part), dict):
            spec[part] = {}
        spec = spec[part]
    spec[last] = copied(value)


def an_eviction(gang: Gang) -> None:
    if isinstance(gang, QueuedGang) and gang.is_queued:
        gang.kueue_takes_its_quota_back()


LIMITS["an eviction"] = an_eviction
