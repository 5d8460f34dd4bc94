"""What becomes of the jobs: states, failures, restarts, starts and recoveries, where the time went.

Counted from the steps between one status and the next. A step is told by the reconciler whose write made it, and by
no other: nothing is counted twice, whether the operator restarts or two of them serve the same jobs.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tpu_training_operator.api.conditions import Reason
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime.metrics import steps
from tpu_training_operator.runtime.observers import JobObserver

NEW = "New"
"""The state of a job that has no status yet."""

_UNREADY = (NEW, State.STARTING, State.RESTARTING)
_ENDS = (
    Reason.ALL_WORKERS_SUCCEEDED,
    Reason.RESTART_LIMIT_REACHED,
    Reason.NOT_RETRYABLE,
    Reason.FAILED_AGAIN,
    Reason.DEADLINE_EXCEEDED,
)
_OTHER_END = "Other"
_START_SECONDS = (5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)
_RECOVERY_SECONDS = (1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 14400)
_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)


class JobMetrics(JobObserver):
    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        def counter(name: str, text: str, label: str, values: Iterable[str]) -> Counter:
            made = Counter(name, text, [label], registry=registry)
            for value in values:
                made.labels(value)
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._clock = clock
        self._states: dict[JobKey, str] = {}
        self._unready_since: dict[JobKey, float] = {}
        self._jobs = Gauge("tpujob_jobs", "Jobs there are, by state.", ["state"], registry=registry)
        for state in (NEW, *State):
            self._jobs.labels(state)
        Gauge(
            "tpujob_longest_unready_seconds",
            "How long the job that waits for its workers has done so, where this process has seen it; the longest.",
            registry=registry,
        ).set_function(lambda: clock() - min(self._unready_since.values(), default=clock()))
        self._failures = counter("tpujob_failures_total", "Attempts that failed.", "class", FailureClass)
        self._restarts = counter("tpujob_restarts_total", "Restarts of gangs after a failure.", "class", FailureClass)
        self._exhausted = counter(
            "tpujob_budgets_exhausted_total",
            "Jobs that failed because no further restart was allowed.",
            "class",
            FailureClass,
        )
        self._finished = counter(
            "tpujob_finished_total",
            "Jobs that ended, by the reason of their condition.",
            "reason",
            (*_ENDS, _OTHER_END),
        )
        self._goodput = counter("tpujob_goodput_seconds_total", "Where the jobs' time went.", "account", steps.ACCOUNTS)
        self._ready = histogram(
            "tpujob_gang_ready_seconds", "From start or resumption to all workers ready.", _START_SECONDS
        )
        self._recovery = histogram(
            "tpujob_recovery_seconds", "From the first failure to all workers ready again.", _RECOVERY_SECONDS
        )
        self._ratio = histogram("tpujob_goodput_ratio", "Productive share of the time of jobs that ended.", _RATIOS)

    def jobs_listed(self, states: Mapping[JobKey, State | None]) -> None:
        # The deletion of a job may have escaped us; the listing knows.
        for key in self._states.keys() - states.keys():
            self.job_gone(key)
        for key, state in states.items():
            self.job_seen(key, state)

    def job_seen(self, key: JobKey, state: State | None) -> None:
        self._leave_state(key)
        self._states[key] = label = state or NEW
        self._jobs.labels(label).inc()
        if label in _UNREADY:
            self._unready_since.setdefault(key, self._clock())
        else:
            self._unready_since.pop(key, None)

    def job_gone(self, key: JobKey) -> None:
        self._leave_state(key)
        self._unready_since.pop(key, None)

    def _leave_state(self, key: JobKey) -> None:
        if state := self._states.pop(key, None):
            self._jobs.labels(state).dec()

    def status_written(self, before: Status, after: Status) -> None:
        if failed := steps.failure(before, after):
            self._failures.labels(failed).inc()
        for failure_class, count in steps.restarts(before, after).items():
            self._restarts.labels(failure_class).inc(count)
        for account, seconds in steps.accounted(before, after).items():
            self._goodput.labels(account).inc(seconds)
        if ready := steps.became_ready(before, after):
            (self._recovery if ready.after_failure else self._ready).observe(ready.seconds)
        if (reason := steps.finish(before, after)) is not None:
            self._count_end(reason, before, after)

    def _count_end(self, reason: str, before: Status, after: Status) -> None:
        self._finished.labels(reason if reason in _ENDS else _OTHER_END).inc()
        if reason in (Reason.RESTART_LIMIT_REACHED, Reason.NOT_RETRYABLE) and after.last_failure:
            self._exhausted.labels(after.last_failure.failure_class).inc()
        if (ratio := steps.final_ratio(before, after)) is not None:
            self._ratio.observe(ratio)
