"""Takes the keys of jobs from the queue and reconciles them, with several workers.

Hints may be lost, late or repeated; the resync and the queue make up for that.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto

from tpu_training_operator.domain.objects.actions import AT_ONCE
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.kube.errors import ApiError, Conflict
from tpu_training_operator.runtime.metrics import Metrics, PassResult
from tpu_training_operator.runtime.reconciler import Reconciler
from tpu_training_operator.runtime.resync import RESYNC_SECONDS
from tpu_training_operator.runtime.work_queue import WorkQueue

log = logging.getLogger(__name__)


class Haste(Enum):
    """The urgency of a pass."""

    FIRST = auto()
    """Before new jobs: hosts stand idle, or the job was changed."""
    NOW = auto()
    SOON = auto()
    """Similar changes are about to follow."""
    IDLE = auto()
    """The job was only listed, so perhaps nothing has happened to it."""


class Pulse:
    """`at`: when the API server last answered a pass, in monotonic seconds. It distinguishes a slow pass from a stuck
    one."""

    def __init__(self) -> None:
        self.at = time.monotonic()


# A context variable, because the tasks that a pass starts inherit it.
_current: ContextVar[Pulse | None] = ContextVar("pulse", default=None)


@contextmanager
def pulse() -> Iterator[Pulse]:
    """Gives everything that runs in this context a pulse, until the block ends."""
    started = Pulse()
    token = _current.set(started)
    try:
        yield started
    finally:
        _current.reset(token)


def beat() -> None:
    """Notes that a request of this context was answered or timed out: its pass makes progress."""
    if current := _current.get():
        current.at = time.monotonic()


# Receives a job's key, its resourceVersion if the job itself has changed, and how soon it needs a pass.
Hint = Callable[[JobKey, str | None, Haste], None]


class Controller:
    """`list_jobs` returns the jobs for the resync. `workers`: the number of jobs that are reconciled at once."""

    def __init__(
        self,
        reconciler: Reconciler,
        list_jobs: Callable[[], Awaitable[list[JobKey]]],
        *,
        settle_seconds: float = 0.02,
        resync_seconds: float = RESYNC_SECONDS,
        workers: int = 16,
        metrics: Metrics | None = None,
    ) -> None:
        self._reconciler = reconciler
        self._list_jobs = list_jobs
        self._resync_seconds = resync_seconds
        self._workers = workers
        self._metrics = metrics
        self._queue: WorkQueue[JobKey] = WorkQueue(settle_seconds, metrics, lambda key: key.namespace, workers)
        self._pulses: dict[JobKey, Pulse] = {}
        self.is_running = False

    def enqueue(self, key: JobKey, haste: Haste = Haste.NOW, *, job_version: str | None = None) -> None:
        """Enqueues a job that may have changed, unless `job_version`, its resourceVersion, comes from our own last
        write: the pass that wrote it also decided when to requeue."""
        if job_version is None or not self._reconciler.wrote(key, job_version):
            settle_seconds = self._reconciler.settle_seconds(key) if haste is Haste.SOON else 0.0
            background, first = haste is Haste.IDLE, haste is Haste.FIRST or self._reconciler.is_restarting(key)
            self._queue.add(key, settle_seconds=settle_seconds, background=background, first=first)

    def enqueue_within(self, key: JobKey, seconds: float) -> None:
        """Requests a pass over the job within so many seconds."""
        self._queue.add_after(key, seconds, first=self._reconciler.is_restarting(key))

    async def run(self) -> None:
        """Works until it is cancelled. The next operator process continues a pass that is interrupted."""
        self.is_running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._resync())
                for _ in range(self._workers):
                    tasks.create_task(self._work())
        finally:
            self.is_running = False
            self._queue.close()

    def longest_standstill_seconds(self) -> float:
        """Returns the longest time for which a pass under way has had no answer; 0 without passes."""
        now = time.monotonic()
        return now - min((pulse.at for pulse in self._pulses.values()), default=now)

    async def _resync(self) -> None:
        while True:
            try:
                for key in await self._list_jobs():
                    self._queue.add(key, background=True)
            except ApiError as error:
                log.warning("jobs could not be listed: %s", error)
            except Exception:
                # One job that cannot be read must not stop the work on all others.
                log.exception("jobs could not be listed")
            await asyncio.sleep(self._resync_seconds)

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            began = time.monotonic()
            try:
                with pulse() as self._pulses[key]:
                    result = await self._one_pass(key)
                if self._metrics:
                    self._metrics.pass_ended(result, time.monotonic() - began)
            finally:
                del self._pulses[key]
                self._queue.done(key)

    async def _one_pass(self, key: JobKey) -> PassResult:
        try:
            again = await self._reconciler.reconcile(key)
            if again == AT_ONCE:
                # Nothing waits between the two steps of a start or a restart.
                again = await self._reconciler.reconcile(key, follows=True)
        except Conflict as conflict:
            log.debug("the job has changed, reading it again: %s", conflict, extra={"job": str(key)})
            self._queue.retry(key)
            return PassResult.REQUEUE
        except ApiError as error:
            log.warning("pass failed, retrying: %s", error, extra={"job": str(key)})
            self._queue.retry(key, pause_seconds=error.retry_after)
            return PassResult.ERROR
        except Exception:
            # A bug must not stop the work on other jobs.
            log.exception("pass failed unexpectedly, retrying", extra={"job": str(key)})
            self._queue.retry(key)
            return PassResult.ERROR
        self._queue.forget(key)
        if again is None:
            return PassResult.SUCCESS
        self._queue.add_after(key, again.total_seconds(), first=self._reconciler.is_restarting(key))
        return PassResult.REQUEUE_AFTER
