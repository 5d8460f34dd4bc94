"""A job of a cluster as a person wants to know it: numbers and facts, no layout. Pure.

`cli.job_rows` puts it into words, for `tpujob watch` and `tpujob status`. What an older or newer operator wrote must
still be readable: whatever is missing is left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from tpu_training_operator.api.conditions import ConditionType, Reason, find, is_true
from tpu_training_operator.api.run_policy import FailureClass, Restart
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.status import Failure, Goodput, Progress, Resolved, State, Status
from tpu_training_operator.domain.hosts import Host, Hosts, summary
from tpu_training_operator.domain.lifecycle.goodput import charge
from tpu_training_operator.domain.lifecycle.restart_budget import Budget, budget
from tpu_training_operator.domain.observed import parse_time


@dataclass(frozen=True)
class JobView:
    """`state_word`: as it was written, which may be one that this version does not know; empty until an operator has
    seen the job. `hosts`: None until it has been resolved.

    `budgets`: of every class, in the API's order; empty where the spec cannot be read. `goodput`: with the running
    activity's seconds up to now. `life`: seconds since the job was created, at most until it finished.
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
    budgets: tuple[Budget, ...]
    goodput: Goodput | None

    @property
    def state(self) -> State | None:
        return self.status.state

    @property
    def resolved(self) -> Resolved | None:
        return self.status.resolved

    @property
    def progress(self) -> Progress | None:
        return self.status.progress

    @property
    def failure(self) -> Failure | None:
        return self.status.last_failure

    @property
    def has_succeeded(self) -> bool:
        return is_true(self.status.conditions, ConditionType.SUCCEEDED)

    @property
    def has_failed(self) -> bool:
        """Over without success, for good: a spec that cannot be, too, for it cannot be changed."""
        return is_true(self.status.conditions, ConditionType.FAILED) or self.state is State.INVALID

    @property
    def is_over(self) -> bool:
        return self.has_succeeded or self.has_failed

    @property
    def life(self) -> int:
        """Seconds, as the goodput counts them."""
        spent = self.goodput
        if spent is None:
            return int((self.now - self.created).total_seconds())
        return int((parse_time(spent.since) - self.created).total_seconds())

    @property
    def slice(self) -> str:
        resolved = self.resolved
        if resolved is None:
            return ""
        return f"{resolved.slices} x {resolved.accelerator_type}" if resolved.slices > 1 else resolved.accelerator_type


def job_view(job: Mapping[str, Any], hosts: Iterable[Host], now: datetime) -> JobView:
    """The job and its pods as they were read; `hosts` may hold pods of other owners and of earlier attempts."""
    metadata, spec = job["metadata"], job["spec"]
    status = Status.read(job.get("status"))
    restart = _restart(spec)
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
        hosts=_hosts(status, [host for host in hosts if host.owner == metadata["uid"]]),
        window=restart.window if restart else "",
        budgets=tuple(budget(restart, status.restarts, kind, now) for kind in FailureClass) if restart else (),
        goodput=_goodput(status, now),
    )


def _message(status: Status) -> str:
    """What was decided last; and before it, what keeps the operator from going on."""
    ready = find(status.conditions, ConditionType.READY)
    decided = ready.message if ready else ""
    reconciling = find(status.conditions, ConditionType.RECONCILING)
    if reconciling is None or reconciling.reason != Reason.PROGRESSING_WITH_RETRY:
        return decided
    return f"{reconciling.message}; before: {decided}" if decided else reconciling.message


def _restart(spec: Mapping[str, Any]) -> Restart | None:
    try:
        return Restart.model_validate((spec.get("runPolicy") or {}).get("restart") or {})
    except ValidationError:
        return None


def _hosts(status: Status, hosts: list[Host]) -> Hosts | None:
    resolved = status.resolved
    if resolved is None:
        return None
    return summary(hosts, status.attempt, resolved.slices, resolved.hosts_per_slice)


def _goodput(status: Status, now: datetime) -> Goodput | None:
    goodput = status.goodput
    return goodput and charge(goodput, now, goodput.activity)


def until(time: str | None, now: datetime) -> timedelta | None:
    """The time that is left until then; None when it is over, or was never to come."""
    left = parse_time(time) - now if time else timedelta(0)
    return left if left > timedelta(0) else None
