"""The actions that a plan may ask for: the operator's only effects, apart from writing the status.

The log names them by their `verb`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, overload

from tpu_training_operator.api.conditions import EventReason
from tpu_training_operator.api.replace import replace
from tpu_training_operator.domain.job.naming import WorkerId

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

    @property
    def verb(self) -> str:
        return f"create {self.body['kind']}"


@dataclass(frozen=True)
class Creations(Sequence[Create]):
    """Creations of one pod for each worker. A pod is built only when it is asked for: thousands of bodies at once would
    not fit into the operator's memory, and would block the event loop for seconds. `build` gets the worker and then the
    `arguments`."""

    workers: tuple[WorkerId, ...]
    build: Callable[..., Create]
    arguments: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.workers)

    @overload
    def __getitem__(self, index: int) -> Create: ...

    @overload
    def __getitem__(self, index: slice) -> "Creations": ...

    def __getitem__(self, index: int | slice) -> "Create | Creations":
        if isinstance(index, slice):
            return replace(self, workers=self.workers[index])
        return self.build(self.workers[index], *self.arguments)


@dataclass(frozen=True)
class Delete:
    """Delete the object with this uid, never another of the same name. `uid` None: whichever one the job controls, if
    there is one. `force`: without waiting for a dead node."""

    kind: str
    name: str
    uid: str | None = None
    force: bool = False
    api_version: str = "v1"

    @property
    def verb(self) -> str:
        return f"delete {self.kind}" + (" by force" if self.force else "")


@dataclass(frozen=True)
class Publish:
    """Create these objects, or replace the job's own where they differ. `version`: the hash of their content, noted
    afterwards."""

    bodies: tuple[dict[str, Any], ...]
    version: str
    verb = "publish addresses"


@dataclass(frozen=True)
class AskForStacks:
    """Ask the reporting worker to send the stacks of its threads with its next report."""

    verb = "ask for stacks"


@dataclass(frozen=True)
class WarnPlaceholderRefused:
    """Send an event about why the gang cannot ask for a better slice, and note that it was sent."""

    why: str
    verb = "warn about placeholders"


@dataclass(frozen=True)
class LookAtEvents:
    """Read the events of these pods and note them. `pods`: names and uids."""

    pods: tuple[tuple[str, str], ...]
    verb = "look at events"


@dataclass(frozen=True)
class UpdateWorkload:
    """Replace the spec of the job's Workload, if it is still the one that was read."""

    body: dict[str, Any]
    verb = "update Workload"


@dataclass(frozen=True)
class WriteWorkloadStatus:
    """Replace the status of the job's Workload, if it is still the one that was read. `frees_quota`: afterwards another
    job may have the chips."""

    body: dict[str, Any]
    frees_quota: bool = False

    @property
    def verb(self) -> str:
        return "give quota back" if self.frees_quota else "report to Kueue"


Action = (
    Create
    | Delete
    | Publish
    | AskForStacks
    | WarnPlaceholderRefused
    | LookAtEvents
    | UpdateWorkload
    | WriteWorkloadStatus
)


@dataclass(frozen=True)
class Event:
    """A Kubernetes event about the job, sent once its status has been written."""

    reason: EventReason
    message: str
    warning: bool = False
