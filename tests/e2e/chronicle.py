"""Everything that the API server reported about one namespace's job and pods, in the order in which it arrived.

It shows what lasts only a moment, such as an attempt that began twice, which no look at the end would reveal.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self, TypeVar

from tests.cluster.api import ApiClient, Object
from tests.cluster.deadlines import deadline

T = TypeVar("T")

ATTEMPT = "tpu-operator.dev/attempt"


@dataclass(frozen=True)
class Moment:
    """`at`: time.monotonic() on arrival. `kind`: ADDED, MODIFIED or DELETED."""

    at: float
    kind: str
    item: Object

    @property
    def name(self) -> str:
        return str(self.item["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.item["metadata"]["uid"])

    @property
    def version(self) -> int:
        """etcd's revision, one sequence for all objects, which orders the events of jobs and pods although they arrive
        on two watches. This holds in the cluster that the tests start; Kubernetes promises it within one kind only."""
        return int(self.item["metadata"]["resourceVersion"])

    @property
    def is_pod(self) -> bool:
        return bool(self.item["kind"] == "Pod")

    @property
    def attempt(self) -> int:
        """The attempt that a pod belongs to."""
        return int(self.item["metadata"]["labels"][ATTEMPT])

    @property
    def is_trouble(self) -> bool:
        """Whether a pod has failed, is being deleted, or is gone."""
        if not self.is_pod:
            return False
        ended = [status["state"].get("terminated", {}) for status in self.item["status"].get("containerStatuses", [])]
        # The kubelet reports the container's end a second before it marks the pod Failed.
        failed = self.item["status"].get("phase") == "Failed" or any(end.get("exitCode") for end in ended)
        return failed or "deletionTimestamp" in self.item["metadata"] or self.kind == "DELETED"


class Chronicle:
    """A context manager; enter it before creating the job. Its record can be read inside the block and after it."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        jobs = f"/apis/tpu-operator.dev/v1alpha1/namespaces/{namespace}/tputrainingjobs"
        self._paths = (jobs, f"/api/v1/namespaces/{namespace}/pods")
        self._api = api
        self._moments: list[Moment] = []
        self._gap: str | None = None
        self._ending = False
        self._news = threading.Condition()
        self._watches = ExitStack()
        self._followers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for path in self._paths:
            events = self._watches.enter_context(self._api.watch(path))
            follower = threading.Thread(target=self._follow, args=(events,), name=f"follows {path}")
            follower.start()
            self._followers.append(follower)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._watches.close()
        for follower in self._followers:
            follower.join()

    def _follow(self, events: Iterator[Object]) -> None:
        for event in events:
            with self._news:
                if event["type"] == "ERROR":
                    self._gap = str(event["object"].get("message"))
                else:
                    self._moments.append(Moment(time.monotonic(), event["type"], event["object"]))
                self._news.notify_all()
        with self._news:
            if not self._ending and self._gap is None:
                self._gap = "it ended, and nobody has asked for that"
            self._news.notify_all()

    def wait(self, find: Callable[["Chronicle"], T | None], *, timeout: float, what: str) -> T:
        """The first result of `find` that is not None, tried at every event. Raises TimeoutError; see `moments`."""
        started = time.monotonic()
        with self._news:
            while (found := find(self)) is None:
                waited = time.monotonic() - started
                if waited > timeout and waited > deadline(timeout):
                    raise TimeoutError(f"not so after {waited:.3g} s: {what}; {self.summary()}")
                self._news.wait(max(1.0, timeout - waited))
        return found

    def moments(self) -> list[Moment]:
        """Raises RuntimeError if the API server ended a watch, so that something may be missing."""
        with self._news:
            if self._gap is not None:
                raise RuntimeError(f"the API server ended a watch: {self._gap}")
            return list(self._moments)

    def job(self) -> Object:
        """Its last version."""
        return [moment.item for moment in self.moments() if not moment.is_pod][-1]

    def statuses(self) -> list[Object]:
        """The job's events, oldest first."""
        return [moment.item["status"] for moment in self.moments() if not moment.is_pod and "status" in moment.item]

    def status(self) -> Object:
        """The job's newest status; empty before the first."""
        return (self.statuses() or [{}])[-1]

    def attempts(self) -> list[int]:
        """Every value that status.attempt has had since the first attempt, without consecutive repetitions."""
        numbers = [status["attempt"] for status in self.statuses() if status.get("attempt")]
        return [number for index, number in enumerate(numbers) if index == 0 or number != numbers[index - 1]]

    def created(self) -> list[str]:
        """The names of all pods that ever existed, one for each uid."""
        return sorted({moment.uid: moment.name for moment in self.moments() if moment.is_pod}.values())

    def pods(self) -> dict[str, Object]:
        """The existing pods, by name."""
        newest = {moment.uid: moment for moment in self.moments() if moment.is_pod}
        return {moment.name: moment.item for moment in newest.values() if moment.kind != "DELETED"}

    def summary(self) -> str:
        """A summary for the message of a failing test."""
        pods = {name: (pod["status"].get("phase"), pod["status"].get("reason")) for name, pod in self.pods().items()}
        return f"status: {self.status()}; pods: {pods}"


@dataclass(frozen=True)
class Recovery:
    """How long a restart took, in seconds: from the first visible failure until all new pods existed.

    stopping: the part spent waiting for the kubelets to end the old workers; the operator took the rest.
    """

    seconds: float
    stopping: float

    @property
    def operator(self) -> float:
        return self.seconds - self.stopping


# Keyed by what had happened.
Recoveries = dict[str, Recovery]


def recovery(chronicle: Chronicle, attempt: int) -> Recovery:
    """The recovery of the restart that led to `attempt`."""
    moments = chronicle.moments()
    decided = next(m.at for m in moments if not m.is_pod and m.item.get("status", {}).get("attempt") == attempt)
    created = [m.at for m in moments if m.is_pod and m.attempt == attempt and m.kind == "ADDED"]
    old = [m for m in moments if m.is_pod and m.attempt == attempt - 1 and m.at < min(created)]
    seen = min([decided, *(m.at for m in old if m.is_trouble)])
    told: dict[str, float] = {}
    for moment in old:
        if moment.kind == "DELETED" or "deletionTimestamp" in moment.item["metadata"]:
            told.setdefault(moment.uid, moment.at)
    gone = [m.at for m in old if m.kind == "DELETED"]
    stopping = max(gone) - max(told.values()) if gone else 0.0
    return Recovery(max(created) - seen, max(0.0, stopping))
