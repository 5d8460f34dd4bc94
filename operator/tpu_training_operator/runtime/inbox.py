"""Keeps the last report of every job in memory, for the reconciler.

A lost report does no harm: everything important is in the status, and the next report comes within seconds.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from tpu_training_operator.domain.cluster_state.worker_reports import EMPTY_INBOX, Inbox, WorkerReport
from tpu_training_operator.kube.cluster import JobKey

_LEAST_PAUSE = timedelta(seconds=5)
_REQUESTS_PER_REPORT = 3
# Jobs whose reports could not be received. Anyone may name any job, so only the latest are kept.
_MOST_LOSSES = 10_000


class Inboxes:
    """Keeps a report for each job that has sent one, until `forget`. Reports may cause half of `requests_per_second`,
    which has a default even where requests are not limited: progress must not occupy the API server."""

    def __init__(self, clock: Callable[[], datetime], requests_per_second: float = 50.0) -> None:
        self._clock = clock
        self._requests_per_second = requests_per_second
        self._listening_since = clock()
        self._inboxes: dict[JobKey, Inbox] = {}
        self._last_losses: OrderedDict[JobKey, datetime] = OrderedDict()

    @property
    def between_writes(self) -> timedelta:
        """The time between two passes over a job that its reports cause: five seconds, or more if so many jobs report
        that this would take more than half of `requests_per_second`."""
        seconds = len(self._inboxes) * _REQUESTS_PER_REPORT / (self._requests_per_second / 2)
        return max(_LEAST_PAUSE, timedelta(seconds=seconds))

    def put(self, key: JobKey, report: WorkerReport) -> None:
        """Keeps the report, unless a later attempt has reported already. A stack dump is kept until the gang makes
        progress: the next hang may be elsewhere."""
        inbox = self.of(key)
        known = inbox.report
        if known is not None and known.attempt > report.attempt:
            return
        if known is not None and _is_stuck(known, report):
            report = replace(report, stacks=report.stacks or known.stacks)
        elif known is not None:
            report = replace(report, stacks=None)
            inbox = replace(inbox, asked_for_stacks=None)
        self._inboxes[key] = replace(inbox, report=report)

    def of(self, key: JobKey) -> Inbox:
        return replace(
            self._inboxes.get(key, EMPTY_INBOX),
            listening_since=self._listening_since,
            last_loss=self._last_losses.get(key),
            between_writes=self.between_writes,
        )

    def note_loss(self, key: JobKey) -> None:
        """Notes that a report for the job was lost, though not by a worker: the silence until now proves nothing."""
        self._last_losses[key] = self._clock()
        self._last_losses.move_to_end(key)
        if len(self._last_losses) > _MOST_LOSSES:
            self._last_losses.popitem(last=False)

    def ask_for_stacks(self, key: JobKey) -> None:
        inbox = self.of(key)
        if inbox.asked_for_stacks is None:
            self._inboxes[key] = replace(inbox, asked_for_stacks=self._clock())

    def wants_stacks(self, key: JobKey) -> bool:
        inbox = self.of(key)
        return inbox.asked_for_stacks is not None and (inbox.report is None or inbox.report.stacks is None)

    def forget(self, key: JobKey) -> None:
        """Drops the report of a job that is gone or has finished."""
        self._inboxes.pop(key, None)


def _is_stuck(known: WorkerReport, report: WorkerReport) -> bool:
    return (known.attempt, known.phase) == (report.attempt, report.phase) and report.step <= known.step
