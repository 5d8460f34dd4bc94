"""What the operator's parts tell about their work, as it happens, and to nobody in particular.

The observers here keep silent; those of `runtime.metrics` count. A part takes the one for its kind of work as an
argument: no part knows Prometheus, and `tpujob run` need not load it.
"""

from collections.abc import Hashable, Mapping
from enum import StrEnum

from tpu_training_operator.api.status import State, Status
from tpu_training_operator.kube.cluster import JobKey


class PassResult(StrEnum):
    """How a pass over a job ended, in controller-runtime's words."""

    SUCCESS = "success"
    REQUEUE = "requeue"
    REQUEUE_AFTER = "requeue_after"
    ERROR = "error"


class WorkObserver:
    """Told by the work queue of its keys, and by the controller of its passes."""

    def added(self, key: Hashable) -> None:
        """The key is due: it waits for a worker, or for the one that has it at the moment."""

    def taken(self, key: Hashable) -> None:
        """A worker has the key."""

    def done(self, key: Hashable) -> None:
        """The worker has given the key back."""

    def retried(self) -> None:
        """Work has failed, and will be tried again."""

    def passed(self, result: PassResult, seconds: float) -> None:
        """A pass has ended after so long."""


class JobObserver:
    """Told by the reconciler, and by `main` of every listing."""

    def jobs_listed(self, states: Mapping[JobKey, State | None]) -> None:
        """These are all the jobs there are."""

    def job_seen(self, key: JobKey, state: State | None) -> None:
        """The job's state at the end of a pass; None before its first status."""

    def job_gone(self, key: JobKey) -> None:
        """There is no such job any more."""

    def status_written(self, before: Status, after: Status) -> None:
        """The API server has accepted `after` in the place of `before`, by resourceVersion: nobody else has written
        between the two, and nobody else will be told of this step."""


class ReportObserver:
    """Told by the progress service."""

    def report_answered(self, status: int) -> None:
        """A worker's report was answered with this HTTP status."""


SILENT_WORK = WorkObserver()
SILENT_JOBS = JobObserver()
SILENT_REPORTS = ReportObserver()
