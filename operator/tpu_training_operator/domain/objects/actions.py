"""The actions that a plan may ask for: the operator's only effects, apart from writing the status."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tpu_training_operator.api.conditions import EventReason

AT_ONCE = timedelta(0)


@dataclass(frozen=True)
class Create:
    """Create `body`. An object of the same name that the job controls counts as created.

    `optional`: if the cluster refuses it, the gang starts without it, and an event reports that. `for_better_slice`: a
    running gang does not wait for it, and once one such object is refused, the rest of its batch is useless and is not
    sent. `again`: an earlier attempt has created the object, so it probably exists.
    """

    body: dict[str, Any]
    optional: bool = False
    for_better_slice: bool = False
    again: bool = False


@dataclass(frozen=True)
class DeletePod:
    """Delete the pod with this uid, never another of the same name. `force`: without waiting for a dead node."""

    name: str
    uid: str
    force: bool = False


@dataclass(frozen=True)
class DeleteConfigMap:
    """Delete the ConfigMap, if it exists and the job controls it."""

    name: str


@dataclass(frozen=True)
class DeleteEndpointSlice:
    """Delete the EndpointSlice, if it exists and the job controls it."""

    name: str


@dataclass(frozen=True)
class Publish:
    """Create these objects, or replace the job's own where they differ. `version`: the hash of their content, noted
    afterwards."""

    bodies: tuple[dict[str, Any], ...]
    version: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself, with everything it owns."""

    name: str
    uid: str


@dataclass(frozen=True)
class AskForStacks:
    """Ask the reporting worker to send the stacks of its threads with its next report."""


@dataclass(frozen=True)
class WarnPlaceholderRefused:
    """Send an event about why the gang cannot ask for a better slice, and note that it was sent."""

    why: str


@dataclass(frozen=True)
class LookAtEvents:
    """Read the events of these pods and note them. `pods`: names and uids."""

    pods: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class UpdateWorkload:
    """Replace the spec of the job's Workload, if it is still the one that was read."""

    body: dict[str, Any]


@dataclass(frozen=True)
class WriteWorkloadStatus:
    """Replace the status of the job's Workload, if it is still the one that was read. `frees_quota`: afterwards another
    job may have the chips."""

    body: dict[str, Any]
    frees_quota: bool = False


@dataclass(frozen=True)
class DeleteWorkload:
    """Delete this Workload of the job, and with it the quota that it holds. `version`: that of Kueue's API."""

    version: str
    name: str
    uid: str


Action = (
    Create
    | Publish
    | DeletePod
    | DeleteConfigMap
    | DeleteEndpointSlice
    | DeleteJob
    | AskForStacks
    | WarnPlaceholderRefused
    | LookAtEvents
    | UpdateWorkload
    | WriteWorkloadStatus
    | DeleteWorkload
)


@dataclass(frozen=True)
class Event:
    """A Kubernetes event about the job, sent once its status has been written."""

    reason: EventReason
    message: str
    warning: bool = False
