"""Reads the logs of a job's workers, over broken connections and over restarts of the gang.

Lines are printed as they come. The reader remembers only its position in a log and an unfinished line.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.constants import CONTAINER_NAME
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.observed import WorkerPod
from tpu_training_operator.domain.job.naming import WorkerId, pod_name
from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey, Object
from tpu_training_operator.kube.errors import InvalidRequest, NotFound, Silence, Unavailable
from tpu_training_operator.kube.informer import Informer

# A longer line is printed in parts of this many bytes.
_LONGEST_LINE = 2**20
_TRIES = 5
# After so long without output the reader looks at the pod and opens the log again.
_SILENT_SECONDS = 30.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 5.0

Write = Callable[[WorkerId, list[bytes]], None]


class NoLog(Exception):
    """There is nothing to show; the message says why."""


@dataclass(frozen=True)
class JobNow:
    """The parts of a job that decide whose log comes next."""

    uid: str
    status: Status

    @staticmethod
    def of(raw: Object) -> "JobNow":
        return JobNow(raw["metadata"]["uid"], Status.read(raw.get("status")))

    @property
    def has_finished(self) -> bool:
        conditions = self.status.conditions
        return is_true(conditions, ConditionType.SUCCEEDED) or is_true(conditions, ConditionType.FAILED)


class LogLines:
    """Returns each line of a log once, however often its stream breaks. In the stream, every line follows its time.

    After a break the log is read again from `since`. The API server takes that time in whole seconds, so some lines
    come twice: earlier lines are recognised by their time, and lines with the newest time by their count.
    """

    def __init__(self, *, show_times: bool = False) -> None:
        self._show_times = show_times
        # The time of the newest line, and how many lines of that time were returned.
        self._newest, self._returned = b"", 0
        # The same values at the last break, and how many lines of that time the new stream has repeated.
        self._known, self._repeated = (b"", 0), 0
        self._rest = b""
        # The time of the line that `_rest` continues, if the first part of that line was returned.
        self._time: bytes | None = None

    @property
    def since(self) -> str | None:
        """The time from which to read; None before the first line."""
        return self._newest.decode() or None

    def reopened(self) -> None:
        """Prepares for a new stream, which begins with a complete line at `since`."""
        self._known, self._repeated = (self._newest, self._returned), 0
        self._rest, self._time = b"", None

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the new lines that this piece of the stream completes."""
        *ended, rest = (self._rest + piece).split(b"\n")
        new = [line for text in ended for line in self._parts(text, is_whole=True)]
        return new + list(self._parts(rest, is_whole=False))

    def end(self) -> list[bytes]:
        """Returns the last line if it has no newline."""
        return list(self._parts(self._rest, is_whole=True)) if self._rest else []

    def _parts(self, text: bytes, *, is_whole: bool) -> Iterator[bytes]:
        while len(text) > _LONGEST_LINE or is_whole:
            if (line := self._unless_known(text[:_LONGEST_LINE])) is not None:
                yield line
            text = text[_LONGEST_LINE:]
            if is_whole and not text:
                self._time = None
                break
        self._rest = text

    def _unless_known(self, text: bytes) -> bytes | None:
        if self._time is None:
            self._time, _, text = text.partition(b" ") if _is_time(text[:20]) else (b"", b"", text)
        time = self._time
        if not time:
            # A message of the kubelet's, for example that the log was rotated.
            return text
        known, returned = self._known
        if time == known:
            self._repeated += 1
        if known and (_order(time) < _order(known) or (time == known and self._repeated <= returned)):
            return None
        self._newest, self._returned = time, self._returned + 1 if time == self._newest else 1
        return time + b" " + text if self._show_times else text


def _is_time(text: bytes) -> bool:
    return len(text) == 20 and text[4:5] == b"-" and text[10:11] == b"T" and text[:4].isdigit()


def _order(time: bytes) -> tuple[bytes, bytes]:
    """Returns a key that sorts times: the fraction may have any number of digits, and the zone is ignored."""
    fraction = time[20:]
    return time[:19], fraction[: len(fraction) - len(fraction.lstrip(b"0123456789"))]


class LogReader:
    """Reads the logs of one job, identified by its uid.

    `write` receives the next lines of a worker, without newlines; `say` receives messages about the reading itself.
    `tail`: at most this many earlier lines of each log.
    """

    def __init__(
        self,
        client: Client,
        key: JobKey,
        job: JobNow,
        write: Write,
        say: Callable[[str], None],
        *,
        tail: int | None = None,
        show_times: bool = False,
    ) -> None:
        self._client = client
        self._key = key
        self._write = write
        self._say = say
        self._tail = tail
        self._show_times = show_times
        self._uid = job.uid
        self._now: JobNow | None = job
        selection = Selection(JOBS, key.namespace, fields={"metadata.name": key.name})
        self._jobs = Informer[JobNow](client, selection, JobNow.of, updated=self._look)
        self._changed = asyncio.Event()
        self._announced_waits: set[int] = set()

    async def show(self, workers: Sequence[WorkerId]) -> None:
        """Writes the logs as they are now, one worker after the other. Raises NoLog or ApiError."""
        for worker in workers:
            await self._log(worker, follow=False)

    async def follow(self, workers: Sequence[WorkerId], *, further_attempts: bool) -> None:
        """Writes the logs until the job ends; with `further_attempts`, also those of later attempts.

        Raises ApiError if the job or a log may not be read.
        """
        work = (self._jobs.run(), self._follow_attempts(workers, further_attempts))
        await _run(work, asyncio.FIRST_COMPLETED)

    def _look(self) -> None:
        job = self._jobs.replica.get((self._key.namespace, self._key.name))
        self._now = job if job is not None and job.uid == self._uid else None
        self._changed.set()

    async def _follow_attempts(self, workers: Sequence[WorkerId], further_attempts: bool) -> None:
        while True:
            await _run(self._log(worker, follow=True) for worker in workers)
            attempt = await self._attempt_after(workers[0].attempt) if further_attempts else None
            if attempt is None:
                return
            self._say(f"attempt {attempt} follows")
            workers = [WorkerId(attempt, worker.slice, worker.host) for worker in workers]

    async def _attempt_after(self, attempt: int) -> int | None:
        """Waits for the next attempt and returns it; None if the job ends instead."""
        while self._now is not None:
            if self._now.status.attempt > attempt:
                return self._now.status.attempt
            if self._now.has_finished:
                return None
            self._changed.clear()
            await self._changed.wait()
        self._say(f"{self._key.name} was deleted")
        return None

    def _is_left_behind(self, attempt: int) -> bool:
        """Returns whether no worker of this attempt can start any longer."""
        return self._now is None or self._now.has_finished or self._now.status.attempt > attempt

    async def _log(self, worker: WorkerId, *, follow: bool) -> None:
        """Writes the worker's whole log, however often its stream breaks."""
        lines = LogLines(show_times=self._show_times)
        fruitless = 0
        while True:
            before = lines.since
            # Asked before the log is opened: only then is the end of the stream the end of the log.
            is_last_read = not follow or await self._has_ended(worker)
            try:
                await self._read(worker, lines, follow=follow)
                if is_last_read:
                    return self._pass_on(worker, lines.end())
            except (NotFound, InvalidRequest) as error:
                # There is no pod, or its container has not started.
                if not follow:
                    raise NoLog(f"there is no pod {self._pod(worker)}" if error.status == 404 else str(error)) from None
                if lines.since is not None or self._is_left_behind(worker.attempt):
                    return None
                self._say_waiting(worker, error)
            except Unavailable as error:
                if follow and isinstance(error, Silence):
                    fruitless = 0
                    continue
                if not follow and fruitless + 1 == _TRIES:
                    raise
                self._say(f"{self._pod(worker)}: connection lost, trying again: {error}")
            fruitless = fruitless + 1 if lines.since == before else 0
            await asyncio.sleep(min(_FIRST_PAUSE * 2.0 ** min(fruitless, 8), _LONGEST_PAUSE))

    async def _read(self, worker: WorkerId, lines: LogLines, *, follow: bool) -> None:
        lines.reopened()
        query = {"container": CONTAINER_NAME, "timestamps": "true", "follow": str(follow).lower()}
        if lines.since is not None:
            query["sinceTime"] = lines.since
        elif self._tail is not None:
            query["tailLines"] = str(self._tail)
        path = f"{PODS.path(self._key.namespace)}/{self._pod(worker)}/log"
        # Closed here, because the event loop would close it only after the connection is gone.
        async with aclosing(self._client.stream(path, query, silent_seconds=_SILENT_SECONDS)) as pieces:
            async for piece in pieces:
                self._pass_on(worker, lines.feed(piece))

    def _pass_on(self, worker: WorkerId, lines: list[bytes]) -> None:
        if lines:
            self._write(worker, lines)

    async def _has_ended(self, worker: WorkerId) -> bool:
        try:
            pod = WorkerPod(await self._client.get(PODS, self._key.namespace, self._pod(worker)))
        except (NotFound, Unavailable):
            return False
        return pod.has_ended or bool(pod.termination)

    def _say_waiting(self, worker: WorkerId, error: Exception) -> None:
        if worker.attempt not in self._announced_waits:
            self._announced_waits.add(worker.attempt)
            self._say(f"waiting for {self._pod(worker)}: {error}")

    def _pod(self, worker: WorkerId) -> str:
        return pod_name(self._key.name, worker)


async def _run(work: Iterable[Coroutine[Any, Any, None]], until: str = asyncio.FIRST_EXCEPTION) -> None:
    """Runs all coroutines. The first error, or what `until` says, cancels the rest; errors are raised unchanged."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=until)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
