"""A minimal cluster: one job, its pods, and the rules that the operator relies on.

The API server's rules: a name is unique; a deletion names a uid; a running pod is marked first and goes later, unless
it is deleted by force; a status is written over the version that was read, or not at all. Operators reach the cluster
through `tests.planner.operators`, kubelets and users through `tests.planner.kubelet`.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.unit.jobs import job_body
from tests.unit.pods import NOON
from tpu_training_operator.api.constants import LABEL_ALTERNATIVE, LABEL_JOB_NAME, LABEL_ROLE, ROLE_ENTRY_CHECK
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.multikueue import prebuilt_workload
from tpu_training_operator.domain.cluster_state.observed import format_time
from tpu_training_operator.domain.cluster_state.ownership import controller
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.cluster_state.workload import Workload, workload_name
from tpu_training_operator.domain.plan.parse_cache import read_status
from tpu_training_operator.kube.cluster import JOBS, PODS, Object, Resource
from tpu_training_operator.kube.encoding import decode, encode
from tpu_training_operator.kube.errors import AlreadyExists, Conflict, NotFound
from tpu_training_operator.runtime.inbox import Inboxes

GRACE = timedelta(seconds=30)
REPORTING = Reporting("https://operator.tpu-operator.svc:8443", "-----BEGIN CERTIFICATE-----")


class ModelCluster:
    """`listens`: the operators have a progress service. `lost`: silent nodes."""

    def __init__(self, changes: dict[str, Any] | None = None, *, listens: bool = False) -> None:
        self.now = NOON
        self.job = job_body(changes)
        self.job["metadata"] |= {"resourceVersion": "1", "creationTimestamp": format_time(self.now)}
        self.job_is_gone = False
        # What a mutating admission webhook does to a new pod.
        self.mutate: Callable[[Object], Any] = lambda pod: None
        self.pods: dict[str, Object] = {}
        self.others: dict[str, Object] = {}
        # Kueue's ResourceFlavors, by name.
        self.flavors: dict[str, Object] = {}
        self.events: list[Object] = []
        # Events about pods from other components, and how often they were read.
        self.pod_events: list[Object] = []
        self.event_lists = 0
        # The operator that makes the passes of a story and remembers things between them.
        self.operator: Any = None
        self.lost: set[str] = set()
        self.reporting = REPORTING if listens else None
        # What the workers say to the one operator that most tests have; tests with several give each its own.
        self.inboxes = self.new_inboxes()
        self._uids = self._addresses = 0
        # What watches tell, by kind: whether the object is gone, and how it was last.
        self.journals: dict[Resource, list[tuple[bool, Object]]] = {JOBS: [], PODS: []}
        self._revisions = {JOBS: 1, PODS: 1}
        self._journaled: dict[Resource, dict[str, Object]] = {JOBS: {}, PODS: {}}

    @property
    def status(self) -> Status:
        return read_status(self.job.get("status"))

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])

    def new_inboxes(self) -> Inboxes | None:
        """The inboxes of an operator that starts to listen now."""
        return Inboxes(lambda: self.now) if self.reporting else None

    # Requests of operators.

    def read_job(self) -> Object:
        if self.job_is_gone:
            raise NotFound(404, "NotFound", "there is no such job")
        return copied(self.job)

    def read(self) -> tuple[Object, list[Object]]:
        return copied(self.job), copied(list(self.pods.values()))

    def picture(self) -> bytes:
        """Job, pods and the Workloads of the job, for `decode`: most pictures are never looked at."""
        return encode([self.job, list(self.pods.values()), self.workloads()])

    def workloads(self) -> list[Object]:
        """Of the present job, in the order in which they were created."""
        return [body for body in self.others.values() if body["kind"] == "Workload" and not self.is_orphan(body)]

    def create(self, body: Object) -> Object:
        if body["kind"] == "Event":
            self.events.append(body)
            return body
        place = self.pods if body["kind"] == "Pod" else self.others
        name = body["metadata"]["name"] if place is self.pods else key_of(body)
        if name in place:
            raise AlreadyExists(409, "AlreadyExists", f"{name} exists")
        body = copied(body)
        self._uids += 1
        body["metadata"] |= {"uid": f"uid-{self._uids}", "creationTimestamp": format_time(self.now)}
        if place is self.pods:
            body["status"] = {"phase": "Pending"}
            self.mutate(body)
        place[name] = body
        if body["kind"] == "Workload":
            body["status"] = {}
            self.touch(body)
        return copied(body)

    def write_status(self, body: Object) -> None:
        read = self.read_job()
        if body["metadata"]["resourceVersion"] != read["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "the job has changed since it was read")
        if body["status"] != read.get("status"):
            self.job["status"] = copied(body["status"])
            self._new_version()

    def replace_other(self, body: Object) -> Object:
        name = key_of(body)
        _find(self.others, name, body["metadata"]["uid"])
        if body["kind"] == "Workload":
            found = self._unchanged(body)
            body = copied(body) | {"status": found["status"]}
            # Kueue counts its quota as free at once.
            self._gives_back(Workload(found), is_free=not Workload(body).is_active)
            self.touch(body)
        self.others[name] = copied(body)
        return copied(body)

    def write_workload_status(self, body: Object) -> Object:
        found = self._unchanged(body)
        self._gives_back(Workload(found), is_free=not Workload(body).holds_quota or Workload(body).is_finished)
        found["status"] = copied(body["status"])
        self.touch(found)
        return copied(found)

    def delete_workload(self, name: str, uid: str) -> None:
        """By an operator."""
        key = f"Workload/{name}"
        _find(self.others, key, uid)
        self._gives_back(Workload(self.others[key]), is_free=True)
        del self.others[key]

    def _gives_back(self, before: Workload, *, is_free: bool) -> None:
        if is_free and before.holds_quota and before.is_active and not before.is_finished:
            active = [name for name, pod in self.pods.items() if self._is_active_worker(pod)]
            covered = [name for name in active if self.covers(before, self.pods[name])]
            assert covered == [], f"quota is given back while {covered} use the chips"

    def covers(self, found: Workload, pod: Object) -> bool:
        """Whether it is the Workload of the slice for which the worker was created."""
        number = int(pod["metadata"]["labels"].get(LABEL_ALTERNATIVE, "0"))
        name = workload_name(self.job["metadata"]["name"], self.uid, number)
        return prebuilt_workload(self.job) != "" or found.name == name

    def _unchanged(self, body: Object) -> Object:
        found = self.others.get(key_of(body))
        if found is None:
            raise NotFound(404, "NotFound", "there is no such Workload")
        if found["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "the Workload has changed since it was read")
        return found

    def _is_active_worker(self, pod: Object) -> bool:
        """Or one that may still get a node."""
        is_over = "deletionTimestamp" in pod["metadata"] and "nodeName" not in pod["spec"]
        has_ended = is_over or pod["status"]["phase"] in ("Succeeded", "Failed")
        labels = pod["metadata"]["labels"]
        # A check runs on a CPU, whatever quota there is.
        is_worker = LABEL_JOB_NAME in labels and labels.get(LABEL_ROLE) != ROLE_ENTRY_CHECK
        return controller(pod).get("uid") == self.uid and not has_ended and is_worker

    def touch(self, body: Object) -> None:
        """It has changed."""
        body["metadata"]["resourceVersion"] = self._next_revision(JOBS)

    # What watches tell.

    def record(self) -> None:
        """Gives everything that has changed a version, as the API server does with every change."""
        self._record(PODS, self.pods)
        self._record(JOBS, {} if self.job_is_gone else {"digits": self.job})

    def current(self, resource: Resource) -> list[Object]:
        """All objects with their versions, as a list shows them."""
        self.record()
        return list(self._journaled[resource].values())

    def versioned(self, pod: Object) -> Object:
        """The pod as the API server answers it."""
        self.record()
        version = self._journaled[PODS][pod["metadata"]["name"]]["metadata"]["resourceVersion"]
        return {**copied(pod), "metadata": {**copied(pod["metadata"]), "resourceVersion": version}}

    def revision(self, resource: Resource) -> int:
        return self._revisions[resource]

    def _record(self, resource: Resource, found: dict[str, Object]) -> None:
        known, journal = self._journaled[resource], self.journals[resource]
        for name, body in list(known.items()):
            if name not in found or found[name]["metadata"]["uid"] != body["metadata"]["uid"]:
                journal.append((True, _with_version(known.pop(name), self._next_revision(resource))))
        for name, body in found.items():
            if name not in known or self._has_changed(resource, known[name], body):
                version = body["metadata"].get("resourceVersion") if resource is JOBS else self._next_revision(resource)
                known[name] = _with_version(copied(body), version)
                journal.append((False, known[name]))

    def _has_changed(self, resource: Resource, known: Object, body: Object) -> bool:
        """A job has the version that its last change has given it."""
        return known != body if resource is JOBS else _without_version(known) != _without_version(body)

    def _next_revision(self, resource: Resource) -> str:
        self._revisions[resource] += 1
        return str(self._revisions[resource])

    def delete_pod(self, name: str, uid: str, grace: timedelta = GRACE) -> None:
        _find(self.pods, name, uid)
        pod = self.pods[name]
        if grace and "nodeName" in pod["spec"] and pod["status"]["phase"] not in ("Succeeded", "Failed"):
            end = format_time(self.now + grace)
            pod["metadata"] = {"deletionTimestamp": end, "deletionGracePeriodSeconds": grace.seconds} | pod["metadata"]
        else:
            del self.pods[name]

    def delete_other(self, name: str, uid: str) -> None:
        _find(self.others, name, uid)
        del self.others[name]

    def delete_job(self, uid: str) -> None:
        """Background deletion, the default: the job is gone at once, its objects follow."""
        if self.read_job()["metadata"]["uid"] != uid:
            raise Conflict(409, "Conflict", "the job was replaced by another one")
        self.job_is_gone = True

    def new_address(self) -> str:
        """One that no pod has had."""
        self._addresses += 1
        return f"10.0.{self._addresses // 256 % 256}.{self._addresses % 256}"

    @property
    def names(self) -> dict[str, str]:
        """By DNS name, the uid of the pod that EndpointSlices lead to."""
        return {
            endpoint["hostname"]: endpoint["targetRef"]["uid"]
            for body in self.others.values()
            if body["kind"] == "EndpointSlice"
            for endpoint in body["endpoints"]
        }

    # What other actors do to the job.

    def edit_run_policy(self, **fields: Any) -> None:
        """The user's `kubectl edit`, which gives a new generation."""
        self.job["spec"]["runPolicy"] = self.job["spec"].get("runPolicy", {}) | fields
        self.job["metadata"]["generation"] += 1
        self._new_version()

    def edit_trainer(self, **fields: Any) -> None:
        self.job["spec"]["trainer"] = self.job["spec"]["trainer"] | fields
        self.job["metadata"]["generation"] += 1
        self._new_version()

    def apply_again(self) -> None:
        """The user deletes the job and applies it again: a new job with the same name."""
        body = {key: value for key, value in self.job.items() if key != "status"}
        self._uids += 1
        fresh = {"uid": f"job-{self._uids}", "generation": 1, "creationTimestamp": format_time(self.now)}
        self.job_is_gone = True
        self.record()
        self.job = {**body, "metadata": {**body["metadata"], **fresh}}
        self.job_is_gone = False
        self._new_version()

    def collect_garbage(self) -> None:
        """Deletes the objects of a deleted job; a running worker gets its grace period."""
        for name, pod in list(self.pods.items()):
            if self.is_orphan(pod) and "deletionTimestamp" not in pod["metadata"]:
                self.delete_pod(name, pod["metadata"]["uid"])
        self.others = {name: body for name, body in self.others.items() if not self.is_orphan(body)}

    def is_orphan(self, body: Object) -> bool:
        owner = controller(body).get("uid")
        return owner is not None and (self.job_is_gone or owner != self.uid)

    def _new_version(self) -> None:
        self.job["metadata"]["resourceVersion"] = self._next_revision(JOBS)


def copied(body: Any) -> Any:
    """A copy, as the other end of a connection receives it."""
    return decode(encode(body))


def key_of(body: Object) -> str:
    return f"{body['kind']}/{body['metadata']['name']}"


def _with_version(body: Object, version: Any) -> Object:
    return {**body, "metadata": {**body["metadata"], "resourceVersion": version}}


def _without_version(body: Object) -> Object:
    return _with_version(body, None)


def _find(place: dict[str, Object], name: str, uid: str) -> None:
    if name not in place:
        raise NotFound(404, "NotFound", f"there is no {name}")
    if place[name]["metadata"]["uid"] != uid:
        raise Conflict(409, "Conflict", f"{name} was replaced by another one")
