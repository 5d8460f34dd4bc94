"""Finds out which worker a token was issued to.

The API server names the pod of a token (TokenReview), and the pod's labels and controller name its job. What the worker
claims about itself is ignored. Namespaces and names are compared before they go into a request.

A worker reports every few seconds, so answers are cached. Anyone may send unknown tokens, and each costs the API server
a request, so these requests wait in one line with a few places for each address.
"""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from tpu_training_operator.api.constants import KIND, PROGRESS_AUDIENCE
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.observed import Observed
from tpu_training_operator.domain.cluster_state.ownership import controller
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.kube.cluster import JOBS, PODS, TOKEN_REVIEWS, Cluster, JobKey, Object
from tpu_training_operator.kube.errors import ApiError, NotFound

# At once, for all workers together: the reconciler sends its requests through the same client.
MOST_QUESTIONS = 10
MOST_QUESTIONS_PER_ADDRESS = 2

_SECONDS_TO_ANSWER = 10.0
# A report may be accepted from a pod that has been gone for this long; the planner ignores it. A pod never changes its
# job or its index.
_KNOWN_SECONDS = 600.0
# Short: a pod that was created just now may not be known everywhere yet.
_REFUSED_SECONDS = 5.0
_MOST_ANSWERS = 10_000
_SERVICE_ACCOUNT = "system:serviceaccount:"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"

_Value = TypeVar("_Value")


class ReportRefused(Exception):
    """The report is refused with the HTTP `status`; the message appears in the worker's log. `retry_after`: seconds, if
    the same report may succeed later."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class TokenNotReviewed(Exception):
    """The API server could not say whose token it is; the message says why. A stranger cannot cause this."""


@dataclass(frozen=True)
class Sender:
    """The worker that a token was issued to, as its pod says. `total_steps`: of its job; None before it is resolved."""

    job: str
    attempt: int
    pod_uid: str
    total_steps: int | None


@dataclass(frozen=True)
class _Pod:
    namespace: str
    name: str
    uid: str


class Cache(Generic[_Value]):
    """Keeps a value for `seconds` and a ReportRefused for less. Any other error goes to all callers that wait for it,
    and is not kept. When there are too many answers, the oldest goes first."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._known: OrderedDict[str, tuple[_Value | ReportRefused, float]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[_Value | ReportRefused]] = {}

    def trusts(self, key: str) -> bool:
        """Returns whether `get` would make no request now, or the last answer was a value, however old."""
        answer, until = self._known.get(key, (None, -math.inf))
        has_value = answer is not None and not isinstance(answer, ReportRefused)
        return has_value or key in self._asking or self._clock() < until

    async def get(self, key: str, ask: Callable[[], Awaitable[_Value]]) -> _Value:
        """Returns the kept answer, or the result of `ask`, which concurrent callers share. Raises ReportRefused, and
        whatever `ask` raises."""
        answer, until = self._known.get(key, (None, 0.0))
        if answer is None or self._clock() >= until:
            task = self._asking.get(key)
            if task is None:
                task = self._asking[key] = asyncio.create_task(self._ask(ask))
                task.add_done_callback(lambda done: self._remember(key, done))
            # A caller that gives up must not cancel the request for the others.
            answer = await asyncio.shield(task)
        if isinstance(answer, ReportRefused):
            raise answer.with_traceback(None)
        return answer

    async def _ask(self, ask: Callable[[], Awaitable[_Value]]) -> _Value | ReportRefused:
        try:
            return await ask()
        except ReportRefused as refused:
            return refused

    def _remember(self, key: str, done: "asyncio.Task[_Value | ReportRefused]") -> None:
        del self._asking[key]
        # asyncio logs an exception that is not read, also if all callers have left.
        if done.cancelled() or done.exception() is not None:
            return
        answer = done.result()
        seconds = _REFUSED_SECONDS if isinstance(answer, ReportRefused) else self._seconds
        self._known.pop(key, None)
        self._known[key] = (answer, self._clock() + seconds)
        if len(self._known) > _MOST_ANSWERS:
            self._known.popitem(last=False)


class Reviewer:
    """`clock`: monotonic seconds."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._turns = asyncio.Semaphore(MOST_QUESTIONS)
        # An address is forgotten as soon as none of its questions waits.
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._pods: Cache[_Pod] = Cache(_KNOWN_SECONDS, clock)
        self._senders: Cache[Sender] = Cache(_KNOWN_SECONDS, clock)

    def trusts(self, token: str) -> bool:
        """Returns whether this token needs no request now, or was accepted the last time."""
        return self._pods.trusts(_digest(token))

    async def sender(self, token: str, key: JobKey, address: str) -> Sender:
        """Returns the job's reporting worker, if it owns this token, which came from `address`.

        Raises ReportRefused: 401 for a token that is not valid here, 403 for a token of anyone else, 404 if the job is
        gone. Raises TokenNotReviewed if the API server could not be asked.
        """
        pod = await self._pods.get(_digest(token), partial(self._ask, address, partial(self._pod_of, token)))
        if pod.namespace != key.namespace:
            raise ReportRefused(403, f"the token belongs to a pod in namespace {pod.namespace}, not {key.namespace}")
        sender = await self._senders.get(pod.uid, partial(self._ask, address, partial(self._sender_in, pod)))
        if sender.job != key.name:
            raise ReportRefused(403, f"pod {pod.name} belongs to job {sender.job}, not {key.name}")
        return sender

    @asynccontextmanager
    async def _turn(self, address: str) -> AsyncIterator[None]:
        places = self._turns_of.get(address)
        if places is None:
            places = self._turns_of[address] = asyncio.Semaphore(MOST_QUESTIONS_PER_ADDRESS)
        async with places, self._turns:
            yield

    async def _ask(self, address: str, question: Callable[[], Awaitable[_Value]]) -> _Value:
        async with self._turn(address):
            try:
                async with asyncio.timeout(_SECONDS_TO_ANSWER):
                    return await question()
            except TimeoutError:
                raise TokenNotReviewed(f"no answer within {_SECONDS_TO_ANSWER:g} s") from None
            except ApiError as error:
                # No error says anything about the worker.
                raise TokenNotReviewed(str(error)) from error

    async def _pod_of(self, token: str) -> _Pod:
        review = await self._cluster.create(
            {
                "apiVersion": TOKEN_REVIEWS.api_version,
                "kind": TOKEN_REVIEWS.kind,
                "metadata": {},
                "spec": {"token": token, "audiences": [PROGRESS_AUDIENCE]},
            }
        )
        status = review.get("status") or {}
        # An authenticator that knows no audiences leaves them out, and vouches only for its own.
        if not status.get("authenticated") or PROGRESS_AUDIENCE not in (status.get("audiences") or ()):
            raise ReportRefused(401, f"the token has expired or is not valid for audience {PROGRESS_AUDIENCE}")
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        names, uids = extra.get(_POD_NAME), extra.get(_POD_UID)
        account = str(user.get("username", ""))
        if not account.startswith(_SERVICE_ACCOUNT) or not names or not uids:
            raise ReportRefused(403, "the token is not bound to a pod; use the one that is mounted into worker 0")
        namespace = account.removeprefix(_SERVICE_ACCOUNT).partition(":")[0]
        return _Pod(namespace, str(names[0]), str(uids[0]))

    async def _sender_in(self, pod: _Pod) -> Sender:
        try:
            body = await self._cluster.get(PODS, pod.namespace, pod.name)
        except NotFound:
            body = None
        if body is None or body["metadata"]["uid"] != pod.uid:
            raise ReportRefused(403, f"pod {pod.name} is gone")
        owner = controller(body)
        if owner.get("kind") != KIND:
            raise ReportRefused(403, f"pod {pod.name} is not a worker of a {KIND}")
        name = str(owner["name"])
        try:
            job = await self._cluster.get(JOBS, pod.namespace, name)
        except NotFound:
            raise ReportRefused(404, f"job {name} is gone") from None
        return _read_sender(job, body)


def _digest(token: str) -> str:
    """Returns what stands for the token in memory, where tokens themselves are not kept."""
    return hashlib.sha256(token.encode()).hexdigest()


def _read_sender(job: Object, pod: Object) -> Sender:
    name = job["metadata"]["name"]
    workers = Observed.of(job, [pod]).pods
    if not workers:
        raise ReportRefused(403, f"pod {pod['metadata']['name']} is not a worker of the present job {name}")
    [worker] = workers
    attempt = worker.worker.attempt
    if worker.worker != WorkerId(attempt, 0, 0):
        raise ReportRefused(403, f"pod {worker.name} is not worker 0; only slice 0 host 0 reports")
    status = Status.read(job.get("status"))
    if attempt > status.attempt:
        raise ReportRefused(403, f"pod {worker.name} belongs to attempt {attempt}, which has not started")
    return Sender(name, attempt, worker.uid, status.resolved.train_steps if status.resolved else None)
