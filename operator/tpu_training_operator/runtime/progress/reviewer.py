"""Which worker a token was made for.

The API server says whose token it is (TokenReview); the pod says what it is, through its labels and its controller. A
worker's own word counts for nothing here. Namespaces and names are compared before they become part of a request.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tpu_training_operator.api.constants import KIND, PROGRESS_AUDIENCE
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.observed import Observed
from tpu_training_operator.domain.ownership import controller
from tpu_training_operator.kube.cluster import JOBS, PODS, TOKEN_REVIEWS, Cluster, JobKey, Object
from tpu_training_operator.kube.errors import ApiError, NotFound
from tpu_training_operator.runtime.progress.answers import Answers
from tpu_training_operator.runtime.progress.refused import Refused
from tpu_training_operator.runtime.progress.sender import Sender
from tpu_training_operator.runtime.progress.turns import Turns

# At once, for all workers together: the reconciler asks the same API server, and waits its turn behind these.
MOST_QUESTIONS = 10
MOST_QUESTIONS_PER_ADDRESS = 2

_SECONDS_TO_ANSWER = 10.0

# For so long a report may still be taken from a pod that is gone; the planner passes over it. A pod does not change its
# job or its place in it.
_KNOWN_SECONDS = 600.0
_SERVICE_ACCOUNT = "system:serviceaccount:"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _Pod:
    namespace: str
    name: str
    uid: str


class NoAnswer(Exception):
    """The API server could not say whose token it is; the message says why. No stranger can bring that about."""


class Reviewer:
    """`clock`: seconds that only ever grow."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._turns = Turns(MOST_QUESTIONS, MOST_QUESTIONS_PER_ADDRESS)
        self._pods: Answers[_Pod] = Answers(_KNOWN_SECONDS, clock)
        self._senders: Answers[Sender] = Answers(_KNOWN_SECONDS, clock)

    def trusts(self, token: str) -> bool:
        """Whether the API server need not be asked about this token, or has accepted it the last time."""
        return self._pods.trusts(_digest(token))

    async def sender(self, token: str, key: JobKey, address: str) -> Sender:
        """The job's reporting worker, whose token this is; `address` is where it came from.

        Raises Refused: 401 for a token that is not valid here, 403 for one of anybody else, 404 when the job is gone;
        NoAnswer when the API server could not be asked.
        """
        pod = await self._pods.get(_digest(token), partial(self._ask, address, partial(self._pod_of, token)))
        if pod.namespace != key.namespace:
            raise Refused(403, f"the token is of a pod in namespace {pod.namespace}, not {key.namespace}")
        sender = await self._senders.get(pod.uid, partial(self._ask, address, partial(self._sender_in, pod)))
        if sender.job != key.name:
            raise Refused(403, f"pod {pod.name} belongs to job {sender.job}, not {key.name}")
        return sender

    async def _ask(self, address: str, question: Callable[[], Awaitable[_Value]]) -> _Value:
        async with self._turns.of(address):
            try:
                async with asyncio.timeout(_SECONDS_TO_ANSWER):
                    return await question()
            except TimeoutError:
                raise NoAnswer("it was not heard from in time") from None
            except ApiError as error:
                # Whatever it was, it says nothing about the worker.
                raise NoAnswer(str(error)) from error

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
        # An authenticator that knows no audiences leaves them out, and vouches for its own only.
        if not status.get("authenticated") or PROGRESS_AUDIENCE not in (status.get("audiences") or ()):
            raise Refused(401, f"the token is not valid for audience {PROGRESS_AUDIENCE}, or no longer")
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        names, uids = extra.get(_POD_NAME), extra.get(_POD_UID)
        account = str(user.get("username", ""))
        if not account.startswith(_SERVICE_ACCOUNT) or not names or not uids:
            raise Refused(403, "the token is not bound to a pod; use the one that is mounted into worker 0")
        namespace = account.removeprefix(_SERVICE_ACCOUNT).partition(":")[0]
        return _Pod(namespace, str(names[0]), str(uids[0]))

    async def _sender_in(self, pod: _Pod) -> Sender:
        try:
            found = await self._cluster.get(PODS, pod.namespace, pod.name)
        except NotFound:
            found = None
        if found is None or found["metadata"]["uid"] != pod.uid:
            raise Refused(403, f"pod {pod.name} is gone")
        name = _job_name(found)
        if name is None:
            raise Refused(403, f"pod {pod.name} is no worker of a {KIND}")
        try:
            job = await self._cluster.get(JOBS, pod.namespace, name)
        except NotFound:
            raise Refused(404, f"job {name} is gone") from None
        return _sender(job, found)


def _digest(token: str) -> str:
    """So that no token is kept in memory."""
    return hashlib.sha256(token.encode()).hexdigest()


def _job_name(pod: Object) -> str | None:
    """The name of the job that controls the pod."""
    owner = controller(pod)
    return str(owner["name"]) if owner.get("kind") == KIND else None


def _sender(job: Object, pod: Object) -> Sender:
    name = job["metadata"]["name"]
    workers = Observed.of(job, [pod]).pods
    if not workers:
        raise Refused(403, f"pod {pod['metadata']['name']} is no worker of job {name} as it is now")
    [worker] = workers
    if worker.worker != WorkerId(worker.worker.attempt, 0, 0):
        raise Refused(403, f"pod {worker.name} is not worker 0; only slice 0 host 0 reports")
    status = Status.read(job.get("status"))
    if worker.worker.attempt > status.attempt:
        raise Refused(403, f"pod {worker.name} is of attempt {worker.worker.attempt}, which has not begun")
    resolved = status.resolved
    return Sender(name, worker.worker.attempt, worker.uid, resolved.train_steps if resolved else None)
