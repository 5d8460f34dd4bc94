"""What a plan asks for: the only effects the operator ever has, apart from writing status. Carried out by
`runtime.execution`, in the order of the plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tpu_training_operator.api.status import Status


@dataclass(frozen=True)
class Create:
    """Create `body`. Done already, if an object of that name exists and the job controls it.

    `optional`: where the cluster refuses it, the gang is made without it, and an event says so."""

    body: dict[str, Any]
    optional: bool = False


@dataclass(frozen=True)
class DeletePod:
    """Delete exactly this pod: the uid keeps a namesake safe. `force`: without waiting for a node that is dead."""

    name: str
    uid: str
    force: bool = False


@dataclass(frozen=True)
class DeleteConfigMap:
    """Delete the ConfigMap, if it exists and the job controls it."""

    name: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself, with all that it owns."""

    name: str
    uid: str


@dataclass(frozen=True)
class AskForStacks:
    """Have the reporting worker say where its threads stand, with its next report."""


@dataclass(frozen=True)
class LookAtEvents:
    """Note what the events of these pods say, by name and uid."""

    pods: tuple[tuple[str, str], ...]


Action = Create | DeletePod | DeleteConfigMap | DeleteJob | AskForStacks | LookAtEvents


@dataclass(frozen=True)
class Event:
    """A Kubernetes event about the job, sent once its status has been written. `warning`: something unwanted."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Plan:
    """First the stages, one after the other, the actions of a stage side by side; then the status, if it changed.

    `again` asks for another pass after that time even if nothing is heard from the cluster.
    """

    stages: tuple[Sequence[Action], ...] = ()
    status: Status | None = None
    events: tuple[Event, ...] = ()
    again: timedelta | None = None
