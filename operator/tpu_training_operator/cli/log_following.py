"""The logs of a job's workers, over broken connections and over restarts of the gang. Used by `tpujob logs`.

What is read goes to the sink as it comes; nothing is kept but where in each log we are.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.constants import CONTAINER_NAME
from tpu_training_operator.api.status import Status
from tpu_training_operator.cli.log_position import LogPosition
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.domain.observed import WorkerPod
from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey, Object
from tpu_training_operator.kube.errors import Invalid, NotFound, Silence, Unavailable
from tpu_training_operator.kube.informer import Informer

_TRIES = 5
# Then the pod is looked at, and the log opened again.
_SILENT_SECONDS = 30.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 5.0


class Sink(Protocol):
    """Where logs go."""

    def write(self, worker: WorkerId, text: bytes) -> None:
        """The next piece of one worker's log; it may end within a line."""
        ...

    def end(self, worker: WorkerId) -> None:
        """The log of this worker is complete."""
        ...

    def say(self, text: str) -> None:
        """Something about the logs, for the person who reads them."""
        ...


class NoLog(Exception):
    """There is nothing to show; the message says why."""


@dataclass(frozen=True)
class JobNow:
    """What decides whose log comes next: which job it is (`uid`), and how far it is."""

    uid: str
    status: Status

    @staticmethod
    def of(raw: Object) -> "JobNow":
        return JobNow(raw["metadata"]["uid"], Status.read(raw.get("status")))

    @property
    def has_finished(self) -> bool:
        conditions = self.status.conditions
        return is_true(conditions, ConditionType.SUCCEEDED) or is_true(conditions, ConditionType.FAILED)


class LogReader:
    """The logs of one job, as it was when it was read. `tail`: of each log no more lines than this before new ones."""

    def __init__(
        self,
        reader: Client,
        key: JobKey,
        job: JobNow,
        sink: Sink,
        *,
        tail: int | None = None,
        show_times: bool = False,
    ) -> None:
        self._reader = reader
        self._key = key
        self._sink = sink
        self._tail = tail
        self._show_times = show_times
        self._uid = job.uid
        self._now: JobNow | None = job
        self._jobs = Informer(
            reader, Selection(JOBS, key.namespace, fields={"metadata.name": key.name}), JobNow.of, self._look
        )
        self._changed = asyncio.Event()
        self._waits_told: set[int] = set()

    async def show(self, workers: Sequence[WorkerId]) -> None:
        """What the workers have written so far, one after the other. Raises NoLog or ApiError."""
        for worker in workers:
            await self._show(worker)
            self._sink.end(worker)

    async def follow(self, workers: Sequence[WorkerId], *, further_attempts: bool) -> None:
        """What the workers write until the job is over; with `further_attempts` that of their successors, too.

        Raises ApiError where the job or a log may not be read.
        """
        watching = asyncio.create_task(self._jobs.run())
        following = asyncio.create_task(self._follow_attempts(workers, further_attempts))
        try:
            done, _ = await asyncio.wait((watching, following), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancel(watching, following)

    def _look(self) -> None:
        found = self._jobs.items.get(self._key.name)
        self._now = found if found is not None and found.uid == self._uid else None
        self._changed.set()

    async def _follow_attempts(self, workers: Sequence[WorkerId], further_attempts: bool) -> None:
        while True:
            await _together(self._follow(worker) for worker in workers)
            attempt = await self._attempt_after(workers[0].attempt) if further_attempts else None
            if attempt is None:
                return
            self._sink.say(f"attempt {attempt} follows")
            workers = [WorkerId(attempt, worker.slice, worker.host) for worker in workers]

    async def _attempt_after(self, attempt: int) -> int | None:
        """The next one, as soon as there is one; None when the job is over instead."""
        while self._now is not None:
            if self._now.status.attempt > attempt:
                return self._now.status.attempt
            if self._now.has_finished:
                return None
            self._changed.clear()
            await self._changed.wait()
        self._sink.say(f"{self._key.name} was deleted")
        return None

    def _is_left_behind(self, attempt: int) -> bool:
        """Nothing of this attempt will start any more."""
        return self._now is None or self._now.has_finished or self._now.status.attempt > attempt

    async def _show(self, worker: WorkerId) -> None:
        position = LogPosition(show_times=self._show_times)
        for attempt in range(_TRIES):
            try:
                return await self._read(worker, position, follow=False)
            except NotFound:
                raise NoLog(f"there is no pod {self._pod(worker)}") from None
            except Invalid as error:
                raise NoLog(str(error)) from None
            except Unavailable as error:
                if attempt + 1 == _TRIES:
                    raise
                self._say_lost(worker, error)
                await asyncio.sleep(_pause(attempt))
        return None

    async def _follow(self, worker: WorkerId) -> None:
        position = LogPosition(show_times=self._show_times)
        in_vain = 0
        while True:
            before = position.since
            # Asked before the log is opened: only then is the end of the log the end of the worker.
            is_last_look = await self._has_ended(worker)
            try:
                await self._read(worker, position, follow=True)
                if is_last_look:
                    break
            except (NotFound, Invalid) as error:
                # No pod, or a container that has not started.
                if position.since is not None or self._is_left_behind(worker.attempt):
                    break
                self._say_waiting(worker, error)
            except Silence:
                in_vain = 0
                continue
            except Unavailable as error:
                self._say_lost(worker, error)
            in_vain = in_vain + 1 if position.since == before else 0
            await asyncio.sleep(_pause(in_vain))
        self._sink.end(worker)

    async def _read(self, worker: WorkerId, position: LogPosition, *, follow: bool) -> None:
        position.broken_off()
        query = {"container": CONTAINER_NAME, "timestamps": "true", "follow": str(follow).lower()}
        if position.since is not None:
            query["sinceTime"] = position.since
        elif self._tail is not None:
            query["tailLines"] = str(self._tail)
        path = f"{PODS.path(self._key.namespace)}/{self._pod(worker)}/log"
        chunks = self._reader.stream(path, query, silent_seconds=_SILENT_SECONDS)
        # Closed here, and not by the event loop's end: the connection is gone by then.
        async with aclosing(chunks):
            async for chunk in chunks:
                if text := position.feed(chunk):
                    self._sink.write(worker, text)

    async def _has_ended(self, worker: WorkerId) -> bool:
        try:
            pod = WorkerPod(await self._reader.get(PODS, self._key.namespace, self._pod(worker)))
        except (NotFound, Unavailable):
            return False
        return pod.has_ended or bool(pod.termination)

    def _say_waiting(self, worker: WorkerId, error: Exception) -> None:
        if worker.attempt not in self._waits_told:
            self._waits_told.add(worker.attempt)
            self._sink.say(f"waiting for {self._pod(worker)}: {error}")

    def _say_lost(self, worker: WorkerId, error: Exception) -> None:
        self._sink.say(f"{self._pod(worker)}: connection lost, trying again: {error}")

    def _pod(self, worker: WorkerId) -> str:
        return worker.pod_name(self._key.name)


def _pause(in_vain: int) -> float:
    return min(_FIRST_PAUSE * 2.0 ** min(in_vain, 8), _LONGEST_PAUSE)


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it; the first failure is raised as it is, and ends the rest."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel(*tasks)


async def _cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
