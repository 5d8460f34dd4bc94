"""Combines a job's status, its pods and the clock into facts, without any layout.

An older or newer operator may have written the status, so fields that are missing or unknown are left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from tpu_training_operator.api.conditions import ConditionType, Reason, find, is_true
from tpu_training_operator.api.run_policy import FailureClass, Restart
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.status import Goodput, State, Status
from tpu_training_operator.api.words import span
from tpu_training_operator.cli.common.prices import Prices
from tpu_training_operator.domain.cluster_state.hosts import Host, Hosts, summarize_hosts
from tpu_training_operator.domain.cluster_state.multikueue import manager_of
from tpu_training_operator.domain.cluster_state.observed import parse_time
from tpu_training_operator.domain.plan.common import accounts
from tpu_training_operator.domain.plan.common.restart_limits import ClassRestarts, restarts_of


@dataclass(frozen=True)
class JobView:
    """The facts about a job at one moment.

    `state_word`: the state as written, which this version may not know; empty before the first status.

    `hosts`: None until the job is resolved. `restarts_by_class`: one for each failure class, in the API's order; empty
    if the spec cannot be read. `window`: how long a restart counts. `goodput`: includes the current activity up to
    `now`, for the chips that the workers held when the status was written. `prices`: None if the user gave none.
    `manager`: the controller that runs the job; empty if it is this cluster's operator.
    """

    name: str
    namespace: str
    uid: str
    now: datetime
    created: datetime
    is_rehearsal: bool
    has_own_loop: bool
    status: Status
    state_word: str
    message: str
    hosts: Hosts | None
    window: str
    restarts_by_class: tuple[ClassRestarts, ...]
    goodput: Goodput | None
    prices: Prices | None = None
    manager: str = ""
    is_being_deleted: bool = False

    @property
    def state(self) -> State | None:
        return self.status.state

    @property
    def is_running(self) -> bool:
        return self.state is State.RUNNING

    @property
    def has_succeeded(self) -> bool:
        return is_true(self.status.conditions, ConditionType.SUCCEEDED)

    @property
    def has_failed(self) -> bool:
        """Whether the job ended without success. An invalid spec ends it, too."""
        return is_true(self.status.conditions, ConditionType.FAILED) or self.state is State.INVALID

    @property
    def is_over(self) -> bool:
        return self.has_succeeded or self.has_failed

    @property
    def life(self) -> int:
        """Seconds from the job's creation to now or to its end: the sum of the goodput's parts."""
        end = parse_time(self.goodput.since) if self.goodput else self.now
        return int((end - self.created).total_seconds())

    @property
    def slice(self) -> str:
        """The slice as text, such as 2 x v5litepod-16."""
        resolved = self.status.resolved
        if resolved is None:
            return ""
        return f"{resolved.slices} x {resolved.accelerator_type}" if resolved.slices > 1 else resolved.accelerator_type

    @property
    def next_attempt_in(self) -> timedelta | None:
        """The wait before the next attempt; None if the job does not wait for one."""
        time = self.status.restarts.next_attempt_time
        left = parse_time(time) - self.now if time and self.state is State.RESTARTING else timedelta(0)
        return left if left > timedelta(0) else None


def job_view(job: Mapping[str, Any], hosts: Iterable[Host], now: datetime) -> JobView:
    """Reads the job's facts. `hosts` may include pods of other owners and of earlier attempts."""
    metadata, spec = job["metadata"], job["spec"]
    status, restart = Status.read(job.get("status")), _restart(spec)
    resolved, goodput = status.resolved, status.goodput
    own_hosts = [host for host in hosts if host.owner == metadata["uid"]]
    return JobView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        now=now,
        created=parse_time(metadata["creationTimestamp"]),
        is_rehearsal=spec.get("slice", {}).get("hardware") == Hardware.CPU,
        has_own_loop="entrypoint" not in spec.get("trainer", {}),
        status=status,
        state_word=str((job.get("status") or {}).get("state") or ""),
        message=_message(status),
        hosts=summarize_hosts(own_hosts, status.attempt, resolved.slices, resolved.hosts_per_slice)
        if resolved
        else None,
        window=span(restart.window_seconds) if restart else "",
        restarts_by_class=tuple(restarts_of(restart, status.restarts, kind, now) for kind in FailureClass)
        if restart
        else (),
        goodput=goodput and accounts.charge(goodput, now, goodput.activity),
        manager=manager_of(job),
        is_being_deleted="deletionTimestamp" in metadata,
    )


def _message(status: Status) -> str:
    """Returns the last decision, after the error that keeps the operator from the next one, if there is one."""
    ready, reconciling = (find(status.conditions, kind) for kind in (ConditionType.READY, ConditionType.RECONCILING))
    decided = ready.message if ready else ""
    if reconciling is None or reconciling.reason != Reason.PROGRESSING_WITH_RETRY:
        return decided
    return f"{reconciling.message}; before: {decided}" if decided else reconciling.message


def _restart(spec: Mapping[str, Any]) -> Restart | None:
    try:
        return Restart.model_validate((spec.get("runPolicy") or {}).get("restart") or {})
    except ValidationError:
        return None
