"""A cluster small enough to hold in one's head: one job, its pods, and the rules that the planner leans on.

The API server's rules: a name is taken once; a deletion names a uid; a pod that runs is marked first and goes later; a
status is written over the version that was read, or not at all.
"""

import copy
from datetime import timedelta
from typing import Any

from tests.unit.jobs import job_body
from tests.unit.pods import NOON
from tpu_training_operator.api.conditions import Reason
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.actions import Action, Create, DeletePod, Plan
from tpu_training_operator.domain.blocked import Obstacle, blocked
from tpu_training_operator.domain.observed import Observed, controller_uid, format_time
from tpu_training_operator.domain.plan import plan

Object = dict[str, Any]
GRACE = timedelta(seconds=30)


class Conflict(Exception):
    """The job is not what it was when it was read."""


class NameTaken(Exception):
    """An object of this name exists and belongs to somebody else."""


class Crash(Exception):
    """The operator dies here."""


class ModelCluster:
    def __init__(self, changes: dict[str, Any] | None = None) -> None:
        self.job = job_body(changes)
        self.job["metadata"]["resourceVersion"] = "1"
        self.pods: dict[str, Object] = {}
        self.others: dict[str, Object] = {}
        self.now = NOON
        self._uids = 0

    @property
    def status(self) -> Status:
        return Status.model_validate(self.job.get("status") or {})

    def read(self) -> tuple[Object, list[Object]]:
        return copy.deepcopy(self.job), copy.deepcopy(list(self.pods.values()))

    def edit_run_policy(self, **fields: Any) -> None:
        """The user's `kubectl edit`: a new generation."""
        self.job["spec"]["runPolicy"] = self.job["spec"].get("runPolicy", {}) | fields
        self.job["metadata"]["generation"] += 1
        self._new_version()

    def create(self, body: Object) -> None:
        place = self.pods if body["kind"] == "Pod" else self.others
        name = body["metadata"]["name"] if place is self.pods else f"{body['kind']}/{body['metadata']['name']}"
        if name in place:
            if controller_uid(place[name]) != self.job["metadata"]["uid"]:
                raise NameTaken(name)
            return
        body = copy.deepcopy(body)
        self._uids += 1
        body["metadata"]["uid"] = f"uid-{self._uids}"
        if place is self.pods:
            body["metadata"]["creationTimestamp"] = format_time(self.now)
            body["status"] = {"phase": "Pending"}
        place[name] = body

    def delete_pod(self, name: str, uid: str) -> None:
        pod = self.pods.get(name)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        if "nodeName" in pod["spec"] and pod["status"]["phase"] not in ("Succeeded", "Failed"):
            marks = {"deletionTimestamp": format_time(self.now + GRACE), "deletionGracePeriodSeconds": GRACE.seconds}
            pod["metadata"] = marks | pod["metadata"]
        else:
            del self.pods[name]

    def write_status(self, as_read: Object, status: Status) -> None:
        if as_read["metadata"]["resourceVersion"] != self.job["metadata"]["resourceVersion"]:
            raise Conflict
        body = status.model_dump(by_alias=True, exclude_none=True, mode="json")
        if body != self.job.get("status"):
            self.job["status"] = body
            self._new_version()

    def carry_out(self, action: Action) -> None:
        match action:
            case Create(body):
                self.create(body)
            case DeletePod(name, uid):
                self.delete_pod(name, uid)
            case _:
                self.others.pop(f"ConfigMap/{action.name}", None)

    def _new_version(self) -> None:
        self.job["metadata"]["resourceVersion"] = str(int(self.job["metadata"]["resourceVersion"]) + 1)


def one_pass(
    cluster: ModelCluster,
    seen: tuple[Object, list[Object]] | None = None,
    *,
    effects: int | None = None,
    turn: int = 0,
) -> Plan:
    """What the reconciler does: read, plan, act, write the status. `seen` is what was read, if not right now.

    The operator crashes after so many `effects`. The actions of a stage have no order; `turn` gives them another one.
    """
    job, pods = seen or cluster.read()
    observed = Observed.of(job, pods)
    decided = plan(observed, cluster.now)
    assert decided == plan(Observed.of(*copy.deepcopy((job, pods))), cluster.now), "the same view, another plan"
    left = effects
    try:
        for stage in decided.stages:
            for action in (*stage[turn:], *stage[:turn]):
                if left == 0:
                    raise Crash
                cluster.carry_out(action)
                left = None if left is None else left - 1
    except NameTaken as taken:
        decided = blocked(observed, Obstacle(Reason.NAME_CONFLICT, f"{taken} belongs to somebody else"), cluster.now)
    if left == 0:
        raise Crash
    if decided.status is not None:
        cluster.write_status(job, decided.status)
    return decided


def actions(decided: Plan) -> list[Action]:
    return [action for stage in decided.stages for action in stage]
