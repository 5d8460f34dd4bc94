"""Runs one job on this machine, from creation to its end.

The same reconciler, planner and pod builders as in a cluster; only the store and the kubelet are local.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import Progress, Status
from tpu_training_operator.domain.naming import WorkerId
from tpu_training_operator.kube.cluster import JOBS, Cluster, JobKey, Object, resource_of
from tpu_training_operator.kube.errors import NotFound
from tpu_training_operator.local.kubelet import Kubelet
from tpu_training_operator.local.listening import listening
from tpu_training_operator.local.progress import ProgressFollower, Report
from tpu_training_operator.local.store import Store
from tpu_training_operator.report.history import HISTORY
from tpu_training_operator.runtime.controller import Controller
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.reconciler import Reconciler

_REPORT_FILES = ("report.html", HISTORY)
_LOOK_SECONDS = 0.1
_ENDS = (ConditionType.SUCCEEDED, ConditionType.STALLED)


@dataclass(frozen=True)
class Update:
    """What has happened since the last update: the status as it is now, new reports of worker 0, and those of their
    warnings that no report had before."""

    status: Status
    reports: tuple[Report, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How the job ended. `losses` and `evaluations` by step, of the last attempt that reached the step, None where a
    number was not finite; `warnings` of all attempts, each once; `checkpoint_step`: the last one saved, None if there
    is none; `cancelled`: we were told to stop. The pods' logs are below `pods_directory`."""

    status: Status
    losses: dict[int, float | None]
    evaluations: dict[int, dict[str, float | None]]
    warnings: tuple[str, ...]
    checkpoint_step: int | None
    cancelled: bool
    seconds: float
    pods_directory: Path


async def run_job(
    job: dict[str, Any],
    directory: Path,
    python_path: Sequence[Path],
    on_update: Callable[[Update], None],
    interrupts: "asyncio.Queue[None]",
) -> Outcome:
    """Run `job` (a valid TPUTrainingJob) with its files below `directory`.

    The first item in `interrupts` stops the gang as a deletion would, with SIGTERM and the grace period; the second
    one at once.
    """
    store, inboxes = Store(), Inboxes(_now)
    pods_directory = directory / "pods"
    _clear(pods_directory, job["metadata"]["name"])
    for name in _REPORT_FILES:
        (directory / name).unlink(missing_ok=True)
    kubelet = Kubelet(store, pods_directory, python_path, report_directory=directory)
    key = JobKey(job["metadata"]["namespace"], job["metadata"]["name"])

    async def list_keys() -> list[JobKey]:
        return [key]

    def heard(reporter: JobKey) -> None:
        controller.hint(reporter, in_seconds=inboxes.pause_seconds)

    async with listening(store, inboxes, heard) as reporting:
        reconciler = Reconciler(store, _now, inboxes=inboxes, reporting=reporting)
        controller = Controller(reconciler, list_keys, settle_seconds=0.01, workers=1)
        store.subscribe(lambda _: controller.hint(key))
        created = await store.create(job)
        control = asyncio.create_task(controller.run())
        watch = _Watch(store, kubelet, key, on_update)
        try:
            cancelled = await _first_of(watch.until_finished(), interrupts.get())
            if cancelled:
                # Before the job is gone: the last look may be older than the attempt that is being stopped.
                await watch.read_status()
                await _stop(store, created, kubelet, interrupts)
            watch.look()
            return watch.outcome(cancelled, pods_directory)
        finally:
            control.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await control
            kubelet.kill_all()
            await kubelet.drain()


def _now() -> datetime:
    return datetime.now(UTC)


def _clear(pods_directory: Path, job_name: str) -> None:
    """Remove what an earlier run of the job left here: its reports and last words would be read as those of now."""
    for leftover in pods_directory.glob(f"{job_name}-[0-9]*-[0-9]*-[0-9]*"):
        shutil.rmtree(leftover)


async def _stop(store: Cluster, job: Object, kubelet: Kubelet, interrupts: "asyncio.Queue[None]") -> None:
    metadata = job["metadata"]
    with contextlib.suppress(NotFound):
        await store.delete(resource_of(job), metadata["namespace"], metadata["name"], metadata["uid"])
    if await _first_of(kubelet.drain(), interrupts.get()):
        kubelet.kill_all()
        await kubelet.drain()


async def _first_of(work: Awaitable[None], interrupt: Awaitable[None]) -> bool:
    """Wait for the work or the interrupt, whichever comes first; True if it was the interrupt."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(interrupt)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    interrupted = not tasks[0].done()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if not interrupted:
        tasks[0].result()
    return interrupted


class _Watch:
    """Looks at the job and at worker 0's progress, and remembers what was reported."""

    def __init__(self, store: Store, kubelet: Kubelet, key: JobKey, on_update: Callable[[Update], None]) -> None:
        self._store = store
        self._kubelet = kubelet
        self._key = key
        self._on_update = on_update
        self._started = asyncio.get_running_loop().time()
        self._followers: dict[int, ProgressFollower] = {}
        self._losses: dict[int, float | None] = {}
        self._evaluations: dict[int, dict[str, float | None]] = {}
        self._warnings: list[str] = []
        self._checkpoint_step: int | None = None
        self._status = Status()
        self._said: Progress | None = None

    async def until_finished(self) -> None:
        while True:
            await self.read_status()
            self.look()
            if is_true(self._status.conditions, ConditionType.FAILED):
                # The other workers are being stopped; their last words are worth the wait.
                await self._kubelet.drain()
                return
            if any(is_true(self._status.conditions, kind) for kind in _ENDS):
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def read_status(self) -> None:
        job = await self._store.get(JOBS, self._key.namespace, self._key.name)
        self._status = Status.read(job.get("status"))

    def look(self) -> None:
        reports = self._new_reports()
        known = len(self._warnings)
        for report in reports:
            self._warnings += [text for text in dict.fromkeys(report.warnings) if text not in self._warnings]
            if report.checkpoint_step is not None:
                self._checkpoint_step = report.checkpoint_step
            first = report.step - len(report.losses) + 1
            self._losses |= {first + index: loss for index, loss in enumerate(report.losses)}
            if report.evaluation is not None:
                self._evaluations[report.evaluation.step] = report.evaluation.metrics
        self._on_update(Update(self._status, tuple(reports), tuple(self._warnings[known:])))

    def outcome(self, cancelled: bool, pods_directory: Path) -> Outcome:
        seconds = asyncio.get_running_loop().time() - self._started
        return Outcome(
            status=self._status,
            losses=dict(sorted(self._losses.items())),
            evaluations=dict(sorted(self._evaluations.items())),
            warnings=tuple(self._warnings),
            checkpoint_step=self._checkpoint_step,
            cancelled=cancelled,
            seconds=seconds,
            pods_directory=pods_directory,
        )

    def _new_reports(self) -> list[Report]:
        # All attempts, the earlier ones first: what a worker reports just before its end is read when the next is due.
        for attempt in range(len(self._followers) + 1, self._status.attempt + 1):
            leader = WorkerId(attempt, 0, 0).pod_name(self._key.name)
            self._followers[attempt] = ProgressFollower(self._kubelet.pod_directory(leader).progress)
        written = [report for follower in self._followers.values() for report in follower.new_reports()]
        return written or self._heard()

    def _heard(self) -> list[Report]:
        """What a loop of the user's own has sent: the trainer's file says it all sooner, and with every loss."""
        said = self._status.progress
        has_file = any(follower.has_said for follower in self._followers.values())
        if has_file or said is None or said.phase is None or said == self._said:
            return []
        self._said = said
        loss = float(said.loss) if said.loss is not None else None
        return [
            Report(
                phase=said.phase.lower(),
                step=said.step,
                total_steps=said.total_steps,
                loss=loss,
                losses=() if loss is None else (loss if isfinite(loss) else None,),
                examples_per_second=float(said.examples_per_second) if said.examples_per_second else None,
                warnings=tuple(said.warnings),
                checkpoint_step=said.checkpoint_step,
            )
        ]
