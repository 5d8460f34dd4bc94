"""What can go wrong between an operator and its API server, as values that `faulty_proxy` injects."""

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One request of the operator.

    verb: as in RBAC: get, list, watch, create, update, delete. resource: the plural, with "/status" for the
    subresource. name: the object's, for a create from the body; empty for list and watch. path: with the query.
    """

    verb: str
    resource: str
    name: str
    path: str

    @property
    def is_discovery(self) -> bool:
        return not self.resource


@dataclass(frozen=True)
class Answer:
    """The proxy answers instead of the API server, which never sees the request. `retry_after`: in seconds."""

    status: int
    body: str
    retry_after: int | None = None


@dataclass(frozen=True)
class Reset:
    """RST. The API server has carried the request out; the operator gets `after` bytes of the answer's body.

    after: None for a connection that breaks before the request arrives anywhere. Also strikes open watches.
    """

    after: int | None = None


@dataclass(frozen=True)
class Hold:
    """Delays the request by `seconds`, then its answer by as much; or both until the fault is off.

    The first delay makes a write late, the second makes a read stale.
    """

    seconds: float = float("inf")


@dataclass(frozen=True)
class Say:
    """Adds a line to a watch that the API server did not send, and ends the watch. Also strikes open watches."""

    line: str


@dataclass(frozen=True)
class Silence:
    """The connection stays open, but nothing comes through. Also strikes open watches."""


Effect = Answer | Reset | Hold | Say | Silence


@dataclass(frozen=True)
class Fault:
    """`times`: how often it strikes while it is on. `share`: the probability that it strikes a matching call."""

    name: str
    concerns: Callable[[Call], bool]
    effect: Effect
    times: float = float("inf")
    share: float = 1.0


@dataclass(frozen=True)
class Entry:
    """One exchange. `taken`: the API server's status, 0 if it was not asked; `told`: the status that the operator saw,
    0 for a broken connection. `at`, `until`: time.monotonic() of arrival and answer. `uid`: of the created object.
    `told_to_wait`: Retry-After, in seconds."""

    call: Call
    at: float
    until: float
    taken: int
    told: int
    uid: str = ""
    told_to_wait: int = 0


def refusal(code: int, reason: str, message: str) -> str:
    """The body of a refusal in the API server's format."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }
    )


def watch_error(code: int, reason: str, message: str) -> str:
    """The event with which an API server ends a watch."""
    return json.dumps({"type": "ERROR", "object": json.loads(refusal(code, reason, message))})


JOB, STATUS = "tputrainingjobs", "tputrainingjobs/status"
READS = (("get", JOB), ("list", "pods"))
WRITES = (
    ("create", "services"),
    ("create", "configmaps"),
    ("create", "pods"),
    ("create", "endpointslices"),
    ("create", "endpoints"),
    ("update", STATUS),
    ("delete", "pods"),
    ("create", "events"),
)
WATCHES = (("watch", JOB), ("watch", "pods"))
LISTS = (("list", JOB), ("list", "pods"))
REQUESTS = READS + WRITES


def on(effect: Effect, *kinds: tuple[str, str], times: float = 1, name: str = "") -> list[Fault]:
    """The effect on the first `times` requests of each kind."""
    return [Fault(f"{name}{' '.join(kind)}", _is(kind), effect, times) for kind in kinds]


def _is(kind: tuple[str, str]) -> Callable[[Call], bool]:
    return lambda call: (call.verb, call.resource) == kind


def anything(call: Call) -> bool:
    return True


def is_read(call: Call) -> bool:
    return call.verb in ("get", "list")


def is_effect(call: Call) -> bool:
    """The calls that follow once a decision is written."""
    return call.verb in ("create", "delete")


is_status_write = _is(("update", STATUS))

CUT_WATCHES = on(Reset(), *WATCHES, name="cut ")
"""Open watches break, so that the operator has to list and watch again."""

CONFLICT = Answer(409, refusal(409, "Conflict", "the object has been modified"))
GONE = Answer(410, refusal(410, "Expired", "too old resource version"))
SLOW_DOWN = Answer(429, refusal(429, "TooManyRequests", "please slow down"), retry_after=1)
BROKEN = Answer(500, refusal(500, "InternalError", "etcdserver: leader changed"))
UNAVAILABLE = Answer(503, refusal(503, "ServiceUnavailable", "not ready"))
SHUTTING_DOWN = Answer(503, refusal(503, "ServiceUnavailable", "apiserver is shutting down"), retry_after=2)
SOMEBODY_ELSE = Answer(200, "<html>Please log in</html>")
EMPTY = Answer(200, "{}")
TOO_OLD = Say(watch_error(410, "Expired", "too old"))
CANNOT_CONVERT = Say(watch_error(500, "InternalError", "cannot convert"))
