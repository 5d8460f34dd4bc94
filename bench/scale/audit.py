"""Who asked the API server for what, and when: read from its audit log.

One source for times and for counts, from outside, the same for every contender. Reading it asks the API server for
nothing, so looking changes little.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # What goes on in a cluster where nothing happens.
        {"level": "None", "users": ["system:apiserver"]},
        {"level": "None", "nonResourceURLs": ["*"]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
        {"level": "None", "resources": [{"group": "", "resources": ["nodes", "nodes/status"]}]},
        {"level": "Metadata"},
    ],
}

READS = ("get", "list")
WATCH = "watch"
_LONGEST_QUIET = 600.0
_POD_POSTED = re.compile(rb'/pods(?:\?[^"]*)?","verb":"create"')

# Accounts by the last part of their names. Those of the controller manager all live in kube-system.
_CONTROLLERS = "system:serviceaccount:kube-system:"
OPERATOR, ENDPOINTS = "operator", ("endpointslices", "endpoints")


@dataclass(frozen=True)
class Request:
    """One request that was answered. `who`: "operator", a controller's name, "kube-scheduler", "kwok" or "admin"."""

    who: str
    agent: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int
    asked: float
    answered: float

    @property
    def is_read(self) -> bool:
        return self.verb in READS

    @property
    def is_write(self) -> bool:
        return self.verb not in (*READS, WATCH)

    @property
    def creates_pod(self) -> bool:
        return self.verb == "create" and self.resource == "pods" and self.code == 201

    @property
    def label(self) -> str:
        return f"{self.verb} {self.resource}"


class AuditLog:
    """The log of one API server from now on. `requests`: what `read` has found so far, in order of the answers."""

    def __init__(self, path: Path, operator: str) -> None:
        self._path = path
        self._operator = operator
        self._at = 0
        self._unread = b""
        self._pods_posted = 0
        self.requests: list[Request] = []

    def read(self) -> int:
        """Take in what was written since; returns how many requests there are now, as a mark for `since`."""
        self._load()
        *lines, self._unread = self._unread.split(b"\n")
        self.requests += (found for line in lines if (found := self._request(json.loads(line))))
        return len(self.requests)

    def pods_posted(self) -> int:
        """Counts the creations of pods that were answered, whatever the answer: cheap, because nothing is parsed."""
        self._load()
        return self._pods_posted

    def _load(self) -> None:
        with self._path.open("rb") as log:
            log.seek(self._at)
            # Ends with a whole line, so that no pattern is cut in two.
            written = log.read().rpartition(b"\n")
        whole = written[0] + written[1]
        self._at += len(whole)
        self._unread += whole
        self._pods_posted += len(_POD_POSTED.findall(whole))

    def since(self, mark: int) -> list[Request]:
        self.read()
        return self.requests[mark:]

    async def quiet(self, seconds: float = 1.0) -> int:
        """Waits until nobody has asked for anything for so long; returns the mark of that moment.

        Writes of endpoints do not count: for a Service without ports, Kubernetes 1.35 may never stop writing them.
        """
        began = since = time.monotonic()
        mark = self.read()
        while time.monotonic() - since < seconds:
            await asyncio.sleep(0.1)
            if any(request.resource not in ENDPOINTS for request in self.since(mark)):
                since = time.monotonic()
            mark = len(self.requests)
            if time.monotonic() - began > _LONGEST_QUIET:
                raise TimeoutError(f"somebody still sends requests after {_LONGEST_QUIET:g} s")
        return mark

    def _request(self, entry: dict[str, Any]) -> Request | None:
        # A watch is answered when it begins, and again when it ends.
        if (entry["verb"] == WATCH) != (entry["stage"] == "ResponseStarted"):
            return None
        thing = entry.get("objectRef") or {}
        kind = (thing.get("resource", ""), thing.get("subresource"))
        return Request(
            who=self._name(entry["user"]["username"]),
            agent=entry.get("userAgent", ""),
            verb=entry["verb"],
            resource="/".join(part for part in kind if part),
            namespace=thing.get("namespace", ""),
            name=thing.get("name", ""),
            code=(entry.get("responseStatus") or {}).get("code", 0),
            asked=datetime.fromisoformat(entry["requestReceivedTimestamp"]).timestamp(),
            answered=datetime.fromisoformat(entry["stageTimestamp"]).timestamp(),
        )

    def _name(self, user: str) -> str:
        if user == self._operator:
            return OPERATOR
        return user.removeprefix(_CONTROLLERS).rpartition(":")[2]


def counts(requests: Iterable[Request]) -> dict[str, dict[str, int]]:
    """Counts how often everybody but the benchmark itself did what: {"operator": {"create pods": 64, ...}, ...}."""
    found: dict[str, Counter[str]] = {}
    for request in requests:
        if request.who != "admin":
            found.setdefault(request.who, Counter())[request.label] += 1
    return {who: dict(sorted(found[who].items())) for who in sorted(found)}


@dataclass(frozen=True)
class Cost:
    """What one or more attempts took of the API server. `other_writes`: the operator's, besides the pods' creation
    and events, for which nobody waits. `endpoint_writes`: by anyone."""

    creates: int
    other_writes: int
    events: int
    reads: int
    endpoint_writes: int

    @staticmethod
    def of(requests: Iterable[Request]) -> "Cost":
        asked = list(requests)
        own = [request for request in asked if request.who == OPERATOR]
        creates = sum(request.creates_pod for request in own)
        events = sum(request.label == "create events" for request in own)
        return Cost(
            creates=creates,
            other_writes=sum(request.is_write for request in own) - creates - events,
            events=events,
            reads=sum(request.is_read for request in own),
            endpoint_writes=sum(request.is_write and request.resource in ENDPOINTS for request in asked),
        )
