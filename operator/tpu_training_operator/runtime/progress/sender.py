"""Who a report is from. Found by `reviewer`, used by `server` and `payload`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sender:
    """The worker that a token was made for, as its pod says. `total_steps`: of its job; None before it is resolved."""

    job: str
    attempt: int
    pod_uid: str
    total_steps: int | None
