"""Implements the `Cluster` protocol in memory, with those rules of an API server on which the operator relies.

One set of contract tests covers this store and `kube.client`: uids, resourceVersion conflicts, the status subresource,
generation, delete preconditions, graceful deletion of pods, pod tokens and their review, and garbage collection.
"""

import copy
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from tpu_training_operator.api.validation import InvalidJob, parse_job
from tpu_training_operator.kube.cluster import JOBS, PODS, TOKEN_REVIEWS, Object, Resource, resource_of
from tpu_training_operator.kube.errors import AlreadyExists, Conflict, InvalidRequest, NotFound

_Key = tuple[str, str, str]

# Kubernetes' default.
_GRACE_SECONDS = 30
_USER_OF_POD = "authentication.kubernetes.io/pod-"


class LocalStore:
    """Stores objects by kind, namespace and name. Subscribers get every object that is written or removed."""

    def __init__(self) -> None:
        self._objects: dict[_Key, Object] = {}
        self._version = 0
        self._subscribers: list[Callable[[Object], None]] = []
        self._tokens: dict[str, Object] = {}

    def subscribe(self, callback: Callable[[Object], None]) -> None:
        self._subscribers.append(callback)

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return copy.deepcopy(self._find(resource, namespace, name))

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[Object]:
        wanted = (labels or {}).items()
        return [
            copy.deepcopy(stored)
            for (plural, place, _), stored in sorted(self._objects.items())
            if plural == resource.plural
            and namespace in (None, place)
            and wanted <= (stored["metadata"].get("labels") or {}).items()
            and all(_field(stored, path) == value for path, value in (fields or {}).items())
        ]

    async def create(self, body: Object) -> Object:
        resource, body = resource_of(body), copy.deepcopy(body)
        if resource is TOKEN_REVIEWS:
            return body | {"status": self._review(**body["spec"])}
        metadata = body["metadata"]
        key = (resource.plural, metadata["namespace"], metadata["name"])
        if key in self._objects:
            raise AlreadyExists(409, "AlreadyExists", f"{resource.plural} {metadata['name']!r} already exists")
        if resource is JOBS:
            _check(body)
        metadata |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": _time()}
        # Only the status subresource sets the status.
        body.pop("status", None)
        if resource is PODS:
            body["status"] = {"phase": "Pending"}
        self._write(key, body)
        created = copy.deepcopy(body)
        self._collect_garbage()
        return created

    async def update(self, body: Object) -> Object:
        """Replaces an object without a status; the operator replaces no others."""
        body = copy.deepcopy(body)
        if body != self._current(body):
            self._write(_key(body), body)
        return copy.deepcopy(body)

    async def update_status(self, body: Object) -> Object:
        return self._set_status(self._current(body), body.get("status") or {})

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> Object | None:
        current = self._find(resource, namespace, name)
        if current["metadata"]["uid"] != uid:
            raise Conflict(409, "Conflict", f"{name} is not the object to delete: its uid differs")
        if grace_seconds == 0:
            self._remove(current)
        else:
            self._delete(current)
        return copy.deepcopy(current) if _key(current) in self._objects else None

    def issue_token(self, pod: Object, audience: str) -> str:
        """Returns a token that is bound to the pod."""
        token = secrets.token_urlsafe()
        metadata = pod["metadata"]
        user = {
            "username": f"system:serviceaccount:{metadata['namespace']}:default",
            "extra": {f"{_USER_OF_POD}{field}": [metadata[field]] for field in ("name", "uid")},
        }
        self._tokens[token] = {"authenticated": True, "audiences": [audience], "user": user}
        return token

    def _review(self, token: str, audiences: Sequence[str]) -> Object:
        """Returns the status of a TokenReview."""
        known = self._tokens.get(token, {})
        return known if set(known.get("audiences", ())) & set(audiences) else {"authenticated": False}

    def bind(self, pod: Object, node: str) -> bool:
        """Assigns the pod to a node; returns False if it is gone. From then on its deletion waits for `remove_pod`."""
        if (stored := self._stored(pod)) is not None:
            stored["spec"]["nodeName"] = node
            self._write(_key(stored), stored)
        return stored is not None

    def set_pod_status(self, pod: Object, status: Object) -> None:
        """Writes the pod's status, as a kubelet does; does nothing if the pod is gone."""
        if (stored := self._stored(pod)) is not None:
            self._set_status(stored, status)

    def has_pod(self, pod: Object) -> bool:
        return self._stored(pod) is not None

    def remove_pod(self, pod: Object) -> None:
        """Removes a deleted pod that the kubelet has stopped."""
        if (stored := self._stored(pod)) is not None:
            self._remove(stored)

    def _stored(self, pod: Object) -> Object | None:
        """Returns the pod as it is now; None if it is gone, or another one has its name."""
        stored = self._objects.get(_key(pod))
        return stored if stored is not None and stored["metadata"]["uid"] == pod["metadata"]["uid"] else None

    def _find(self, resource: Resource, namespace: str, name: str) -> Object:
        stored = self._objects.get((resource.plural, namespace, name))
        if stored is None:
            raise NotFound(404, "NotFound", f"{resource.plural} {name!r} not found")
        return stored

    def _current(self, body: Object) -> Object:
        """Returns the stored object. Raises Conflict if `body` is from another version of it."""
        metadata = body["metadata"]
        current = self._find(resource_of(body), metadata["namespace"], metadata["name"])
        if metadata.get("resourceVersion") != current["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", f"{metadata['name']} has been modified; read it again")
        return current

    def _set_status(self, current: Object, status: Object) -> Object:
        # As in an API server, an unchanged object keeps its version.
        if current.get("status") != status:
            current["status"] = copy.deepcopy(status)
            self._write(_key(current), current)
        return copy.deepcopy(current)

    def _write(self, key: _Key, body: Object) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = body
        self._tell(body)

    def _delete(self, current: Object) -> None:
        is_pod = resource_of(current) is PODS
        if is_pod and "nodeName" in current["spec"] and current["status"]["phase"] not in ("Succeeded", "Failed"):
            if "deletionTimestamp" not in current["metadata"]:
                grace = current["spec"].get("terminationGracePeriodSeconds", _GRACE_SECONDS)
                ends = {"deletionTimestamp": _time(timedelta(seconds=grace)), "deletionGracePeriodSeconds": grace}
                current["metadata"] |= ends
                self._write(_key(current), current)
            return
        self._remove(current)

    def _remove(self, current: Object) -> None:
        del self._objects[_key(current)]
        self._tell(current)
        self._collect_garbage()

    def _collect_garbage(self) -> None:
        """Deletes objects whose owners are gone, as the garbage collector does in the background."""
        uids = {stored["metadata"]["uid"] for stored in self._objects.values()}
        for stored in list(self._objects.values()):
            owners = stored["metadata"].get("ownerReferences") or ()
            orphaned = owners and not any(owner["uid"] in uids for owner in owners)
            if orphaned and _key(stored) in self._objects:
                self._delete(stored)

    def _tell(self, body: Object) -> None:
        for callback in self._subscribers:
            callback(copy.deepcopy(body))


def _field(body: Object, path: str) -> Any:
    for name in path.split("."):
        body = body.get(name) or {}
    return body


def _key(body: Object) -> _Key:
    return resource_of(body).plural, body["metadata"]["namespace"], body["metadata"]["name"]


def _check(body: Object) -> None:
    try:
        parse_job(body)
    except InvalidJob as error:
        raise InvalidRequest(422, "Invalid", str(error)) from None


def _time(ahead: timedelta = timedelta(0)) -> str:
    return (datetime.now(UTC) + ahead).isoformat().replace("+00:00", "Z")
