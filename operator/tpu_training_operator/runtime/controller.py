"""Hints in, passes out: the workers that take keys from the queue and reconcile them.

Run by `main` in a cluster and by `local.run` on this machine. A hint may be lost, late or doubled; the resync and the
queue make up for it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.kube.errors import ApiError, Conflict
from tpu_training_operator.runtime.health import Pulse, pulse
from tpu_training_operator.runtime.metrics import Metrics, PassResult
from tpu_training_operator.runtime.reconciler import Reconciler
from tpu_training_operator.runtime.work_queue import WorkQueue

log = logging.getLogger(__name__)


class Controller:
    """`list_keys` names the jobs for the resync; `workers` is how many jobs are worked on at once."""

    def __init__(
        self,
        reconciler: Reconciler,
        list_keys: Callable[[], Awaitable[list[JobKey]]],
        *,
        settle_seconds: float = 0.1,
        resync_seconds: float = 300.0,
        workers: int = 16,
        metrics: Metrics | None = None,
    ) -> None:
        self._reconciler = reconciler
        self._list_keys = list_keys
        self._resync_seconds = resync_seconds
        self._workers = workers
        self._metrics = metrics
        self._queue: WorkQueue[JobKey] = WorkQueue(settle_seconds, metrics)
        self._pulses: dict[JobKey, Pulse] = {}
        self.is_running = False

    def hint(
        self,
        key: JobKey,
        *,
        in_seconds: float | None = None,
        job_version: str | None = None,
        background: bool = False,
    ) -> None:
        """Something about the job may have changed: look at once, or in so many seconds at the latest. Not for
        `job_version`, the job's resourceVersion, where that is of our own last write: a pass that writes says itself
        when the next is due. `background`: it is only listed, and nothing says that it has changed."""
        if job_version is not None and self._reconciler.wrote(key, job_version):
            return
        if in_seconds is None:
            self._queue.hint(key, settle_seconds=self._reconciler.settle_seconds(key), background=background)
        else:
            self._queue.add_after(key, in_seconds)

    async def run(self) -> None:
        """Work until cancelled. A pass that is under way when we are stopped is continued by the next operator."""
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
        """How long ago the pass under way that has waited longest had its last answer; 0 when there is none."""
        return time.monotonic() - min((pulse.at for pulse in self._pulses.values()), default=time.monotonic())

    async def _resync(self) -> None:
        while True:
            try:
                for key in await self._list_keys():
                    self._queue.hint(key, background=True)
            except ApiError as error:
                log.warning("jobs could not be listed: %s", error)
            except Exception:
                # One job that cannot be read must not end the work on all others.
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
        except Conflict as conflict:
            log.debug("read again, the job has changed: %s", conflict, extra={"job": str(key)})
            self._queue.retry(key)
            return PassResult.REQUEUE
        except ApiError as error:
            log.warning("pass failed, will be tried again: %s", error, extra={"job": str(key)})
            self._queue.retry(key, pause_seconds=error.retry_after)
            return PassResult.ERROR
        except Exception:
            # A bug must not take the other jobs down with it.
            log.exception("pass failed unexpectedly, will be tried again", extra={"job": str(key)})
            self._queue.retry(key)
            return PassResult.ERROR
        self._queue.forget(key)
        if again is None:
            return PassResult.SUCCESS
        self._queue.add_after(key, again.total_seconds())
        return PassResult.REQUEUE_AFTER
