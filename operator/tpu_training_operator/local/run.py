"""Runs one job on this machine, from creation to its end.

The reconciler, planner, pod builders and progress service are those of a cluster; only the store and the kubelet are
local.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from tpu_contract.protocol import HISTORY_FILE
from tpu_training_operator.api.conditions import ConditionType, Reason, find, is_true
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.job.naming import WorkerId, entry_check_pod_name
from tpu_training_operator.domain.job.trainer_report import read_last_words
from tpu_training_operator.kube.cluster import JOBS, PODS, JobKey, Object, resource_of
from tpu_training_operator.kube.errors import NotFound
from tpu_training_operator.local.kubelet import Kubelet
from tpu_training_operator.local.outages import Outage, Outages
from tpu_training_operator.local.store import LocalStore
from tpu_training_operator.runtime.controller import Controller
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.progress.pki import new_authority, server_tls
from tpu_training_operator.runtime.progress.server import ProgressServer, serve
from tpu_training_operator.runtime.progress.tokens import Reviewer
from tpu_training_operator.runtime.reconciler import Reconciler
from tpu_training_operator.runtime.resync import jobs_to_reconcile

WEIGHTS = ("model.safetensors", "ema.safetensors")
"""The files in which a worker leaves its weights if the run has no checkpoints."""

_LEFT_BY_AN_EARLIER_RUN = ("report.html", HISTORY_FILE, *WEIGHTS)
_ENDS = (ConditionType.SUCCEEDED, ConditionType.FAILED, ConditionType.STALLED)
_HOST, _ADDRESS = "localhost", "127.0.0.1"
_TICK_SECONDS = 1.0
# Changes that come together are shown together.
_SETTLE_SECONDS = 0.1
_LONGEST_LINE = 4096

# Receives the job and its pods.
OnChange = Callable[[Object, list[Object]], None]


@dataclass(frozen=True)
class RunOutcome:
    """How the job ended. `losses`: those that the status has shown, by step, None if not finite; `warnings`: of all
    attempts, each once; `cancelled`: whether an interrupt ended it; `pods_directory`: has the pods' logs;
    `checkpoint_step`: the newest saved step."""

    status: Status
    losses: dict[int, float | None]
    warnings: tuple[str, ...]
    cancelled: bool
    seconds: float
    pods_directory: Path
    checkpoint_step: int | None = None


def pods_below(directory: Path) -> Path:
    """Returns where a run in `directory` keeps its pods' files."""
    return directory / "pods"


class WorkerLogs:
    """The logs below a run's directory of pods."""

    def __init__(self, pods_directory: Path) -> None:
        self._directory = pods_directory
        self._read: dict[Path, int] = {}

    def new_lines(self, *, with_last: bool = False) -> Iterator[tuple[str, str]]:
        """Yields pod and line, for all lines since the last call. An unfinished last line is left out, unless
        `with_last`."""
        for path in sorted(self._directory.glob("*/log.txt")):
            start = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                new = file.read()
            until = len(new) if with_last else new.rfind(b"\n") + 1
            # A very long unfinished line would otherwise be read again and again.
            until = until or (len(new) if len(new) > _LONGEST_LINE else 0)
            self._read[path] = start + until
            for line in new[:until].decode(errors="replace").splitlines():
                yield path.parent.name, line


def _adapt_job(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the job in a namespace, and without `managedBy`: it runs here, whatever manages it in a cluster."""
    metadata = {**job["metadata"], "namespace": job["metadata"].get("namespace") or "default"}
    spec = {name: value for name, value in job["spec"].items() if name != "managedBy"}
    return {**job, "metadata": metadata, "spec": spec}


async def run_job(
    job: dict[str, Any],
    directory: Path,
    python_path: Sequence[Path],
    on_change: OnChange,
    interrupts: "asyncio.Queue[None]",
    outages: Sequence[Outage] = (),
) -> RunOutcome:
    """Runs `job` (a valid TPUTrainingJob) with its files below `directory`; `on_change` is called after every change.

    The first item in `interrupts` stops the gang as a deletion would, with SIGTERM and the grace period; the second
    kills it. `outages`: slices that are lost for a while.
    """
    started = time.monotonic()
    store, inboxes = LocalStore(), Inboxes(_now)
    job = _adapt_job(job)
    key = JobKey(job["metadata"]["namespace"], job["metadata"]["name"])
    pods_directory = pods_below(directory)
    _clear(pods_directory, key.name)
    for name in _LEFT_BY_AN_EARLIER_RUN:
        (directory / name).unlink(missing_ok=True)
    kubelet = Kubelet(store, pods_directory, python_path, report_directory=directory, outages=Outages(outages))
    watch = _JobWatch(store, on_change)

    def enqueue(reporter: JobKey, seconds: float) -> None:
        controller.enqueue_within(reporter, seconds)

    async with _progress_service(store, inboxes, enqueue) as reporting:
        reconciler = Reconciler(store, _now, inboxes=inboxes, reporting=reporting)
        list_jobs = partial(jobs_to_reconcile, store, (key.namespace,), _now)
        controller = Controller(reconciler, list_jobs, settle_seconds=0.01, workers=1)
        store.subscribe(lambda _: controller.enqueue(key))
        created = await store.create(job)
        control = asyncio.create_task(controller.run())
        try:
            cancelled = await _was_interrupted(_wait_until_finished(watch, kubelet), interrupts.get())
            if cancelled:
                await _stop(store, created, kubelet, interrupts)
            await watch.catch_up()
        finally:
            control.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await control
            kubelet.kill_all()
            await kubelet.drain()
            await kubelet.close()
    progress, leader = watch.status.progress, WorkerId(watch.status.attempt, 0, 0).pod_name(key.name)
    # The status of a cancelled job ends before its workers save.
    words = read_last_words(kubelet.pod_directory(leader).read_termination()) if cancelled else None
    known = progress.checkpoint_step if progress else None
    return RunOutcome(
        status=watch.status,
        losses=dict(sorted(watch.losses.items())),
        warnings=tuple(watch.warnings),
        cancelled=cancelled,
        seconds=time.monotonic() - started,
        pods_directory=pods_directory,
        checkpoint_step=known if words is None or words.checkpoint_step is None else words.checkpoint_step,
    )


@contextlib.asynccontextmanager
async def _progress_service(
    store: LocalStore, inboxes: Inboxes, enqueue: Callable[[JobKey, float], None]
) -> AsyncIterator[Reporting]:
    """Serves the progress service, with an authority for this run only, on a port that only this machine reaches."""
    authority = new_authority(_HOST, _now())
    service = ProgressServer(Reviewer(store, time.monotonic), inboxes, enqueue, _now, time.monotonic)
    async with server_tls(authority, (_HOST,), _now) as tls, serve(service, 0, tls, _ADDRESS) as port:
        yield Reporting(f"https://{_HOST}:{port}", authority.pem.certificate.decode())


def _now() -> datetime:
    return datetime.now(UTC)


def _clear(pods_directory: Path, job_name: str) -> None:
    """Removes the files of an earlier run of the job, so that they are not read as this run's."""
    earlier = pods_directory.glob(f"{job_name}-[0-9]*-[0-9]*-[0-9]*")
    for leftover in (*earlier, *pods_directory.glob(entry_check_pod_name(job_name))):
        shutil.rmtree(leftover)


async def _stop(store: LocalStore, job: Object, kubelet: Kubelet, interrupts: "asyncio.Queue[None]") -> None:
    metadata = job["metadata"]
    with contextlib.suppress(NotFound):
        await store.delete(resource_of(job), metadata["namespace"], metadata["name"], metadata["uid"])
    if await _was_interrupted(kubelet.drain(), interrupts.get()):
        kubelet.kill_all()
        await kubelet.drain()


async def _was_interrupted(work: Awaitable[None], interrupt: Awaitable[None]) -> bool:
    """Waits for the work or the interrupt, whichever comes first; True if it was the interrupt."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(interrupt)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    interrupted = not tasks[0].done()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if not interrupted:
        tasks[0].result()
    return interrupted


async def _wait_until_finished(watch: "_JobWatch", kubelet: Kubelet) -> None:
    await watch.until_finished()
    if is_true(watch.status.conditions, ConditionType.FAILED):
        # Waits for the last words of the other workers, which are being stopped.
        await kubelet.drain()


def is_over(status: Status) -> bool:
    """Returns whether the job has ended. A job out of budget has ended once its workers have stopped: its budget cannot
    be raised here."""
    suspended = find(status.conditions, ConditionType.SUSPENDED)
    if suspended is not None and suspended.is_true and suspended.reason == Reason.BUDGET_EXCEEDED:
        return is_true(status.conditions, ConditionType.READY)
    return any(is_true(status.conditions, end) for end in _ENDS)


class _JobWatch:
    """Passes the store's only job and its pods to `on_change`, and remembers what a later status no longer shows."""

    def __init__(self, store: LocalStore, on_change: OnChange) -> None:
        self._store = store
        self._on_change = on_change
        self._job: Object = {}
        self._changes: asyncio.Queue[Object] = asyncio.Queue()
        self.status = Status()
        self.losses: dict[int, float | None] = {}
        self.warnings: dict[str, None] = {}
        store.subscribe(self._enqueue)

    def _enqueue(self, body: Object) -> None:
        # Through a queue, so that a failing display does not look like a failing write to the store.
        self._changes.put_nowait(body)

    async def until_finished(self) -> None:
        while not is_over(self.status):
            # Shown even without a change, because clocks advance.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    self._see(await self._changes.get())
                await asyncio.sleep(_SETTLE_SECONDS)
            await self.catch_up()

    async def catch_up(self) -> None:
        while not self._changes.empty():
            self._see(self._changes.get_nowait())
        if self._job:
            self._on_change(self._job, await self._store.list(PODS, self._job["metadata"]["namespace"]))

    def _see(self, body: Object) -> None:
        if body["kind"] != JOBS.kind:
            return
        self._job, self.status = body, Status.read(body.get("status"))
        if (progress := self.status.progress) is not None and progress.phase is not None:
            self.warnings |= dict.fromkeys(progress.warnings)
            if progress.loss is not None:
                loss = float(progress.loss)
                self.losses[progress.step] = loss if isfinite(loss) else None
