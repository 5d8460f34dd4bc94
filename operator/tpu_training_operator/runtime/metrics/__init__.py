"""The operator's Prometheus metrics: the table of all series, and the one object that counts.

Parts of the operator take `Metrics | None` and report events as they happen; docs/metrics.md explains each series.
Every series exists from the start, at 0, or from the first job of its namespace on. This bounds their number, keeps the
names of jobs out of labels, and lets rate() see the first event: Prometheus does not count an increase from nothing.

/metrics has neither encryption nor authentication: it serves numbers and the names of namespaces, and only inside the
cluster's network (docs/metrics.md).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from itertools import product
from typing import Any, NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from tpu_contract.protocol import StartPhase
from tpu_training_operator.api.conditions import Reason
from tpu_training_operator.api.run_policy import FailureClass
from tpu_training_operator.api.status import ChipSeconds, Goodput, State, Status
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime.metrics import transitions
from tpu_training_operator.runtime.ports import Bounds, serve_bounded
from tpu_training_operator.version import version


class PassResult(StrEnum):
    """The result of a pass over a job, in controller-runtime's words. REQUEUE: the job had changed in the meantime."""

    SUCCESS = "success"
    REQUEUE = "requeue"
    REQUEUE_AFTER = "requeue_after"
    ERROR = "error"


NEW = "New"
"""The state of a job that has no status yet."""

_UNREADY = (NEW, State.STARTING, State.RESTARTING)
_EXHAUSTED = (Reason.RESTART_LIMIT_REACHED, Reason.NOT_RETRYABLE)
_ENDS = (
    Reason.ALL_WORKERS_SUCCEEDED,
    *_EXHAUSTED,
    Reason.ENTRY_FAILED,
    Reason.BUCKET_OUTSIDE_REGION,
    Reason.STEP_TOO_LARGE,
    Reason.STEP_NOT_COMPILED,
    Reason.DIVERGED_TWICE,
    Reason.GATE_FAILED,
    Reason.DEADLINE_EXCEEDED,
    Reason.BUDGET_EXCEEDED,
)
_OTHER_END = "Other"

_CONTROLLER = "tputrainingjob"
# Every HTTP status that an API server, or a proxy in front of it, is known to return.
_CODES = (200, 201, 202, 400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 422, 429, 500, 501, 502, 503, 504)
_NO_ANSWER = "<error>"
_OTHER = "other"
_ANSWERS = {
    200: "accepted",
    400: "malformed",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    408: "too_slow",
    413: "too_large",
    429: "too_many",
    503: "unavailable",
}
# Answers that anyone can cause.
_OF_STRANGERS = (401, 403, 404, 429)
_STRANGER = "stranger"

_WORK_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_START_BUCKETS = (5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)
_RECOVERY_BUCKETS = (1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 14400)
_RATIO_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
_LAG_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)

_NAMESPACE = "job_namespace"
"""The label with the job's namespace. Prometheus gives the label `namespace` to the operator's own."""
_OTHER_NAMESPACES = "<other>"
"""The namespaces beyond the first ones; no namespace can have this name."""
_BY_NAMESPACE = {_NAMESPACE: (_OTHER_NAMESPACES,)}
_STATE = {"state": (NEW, *State)}
_AFTER = {"after": ("failure", "other")}
_CLASS = {"class": tuple(FailureClass)}
_RECONCILER = {"controller": (_CONTROLLER,)}
_QUEUE = {"name": (_CONTROLLER,)}
_VERBS = ("GET", "POST", "PUT", "DELETE")


class _Family(NamedTuple):
    """All series of one name: `labels` with every value that each label can have."""

    kind: type[Counter | Gauge | Histogram]
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}
    buckets: tuple[float, ...] = ()


_FAMILIES = {
    "tpujob_jobs": _Family(Gauge, "Jobs, by state.", {**_BY_NAMESPACE, **_STATE}),
    "tpujob_longest_unready_seconds": _Family(
        Gauge, "How long jobs have waited for their workers, by their status: the longest wait."
    ),
    "tpujob_failures_total": _Family(Counter, "Attempts that failed.", _CLASS),
    "tpujob_restarts_total": _Family(Counter, "Restarts of gangs after a failure.", {**_BY_NAMESPACE, **_CLASS}),
    "tpujob_restarts_exhausted_total": _Family(
        Counter, "Jobs that failed because no further restart was allowed.", _CLASS
    ),
    "tpujob_finished_total": _Family(
        Counter, "Jobs that ended, by the reason of their condition.", {"reason": (*_ENDS, _OTHER_END)}
    ),
    "tpujob_gang_ready_seconds": _Family(
        Histogram, "From start or resumption to all workers ready.", {}, _START_BUCKETS
    ),
    "tpujob_recovery_seconds": _Family(
        Histogram, "From the first failure to all workers ready again.", {}, _RECOVERY_BUCKETS
    ),
    "tpujob_starts_total": _Family(Counter, "Attempts that made their first step, by what they came after.", _AFTER),
    "tpujob_start_seconds_total": _Family(
        Counter,
        "Where the time up to the first steps of attempts went.",
        {**_AFTER, "phase": tuple(StartPhase)},
    ),
    "tpujob_goodput_seconds_total": _Family(Counter, "Where the jobs' time went.", {"account": Goodput.ACCOUNTS}),
    "tpujob_chip_seconds_total": _Family(
        Counter, "What the jobs' chips did.", {**_BY_NAMESPACE, "account": ChipSeconds.ACCOUNTS}
    ),
    "tpujob_chip_budgets_exceeded_total": _Family(
        Counter, "Jobs that were stopped because their budget of chip-hours was used up."
    ),
    "tpujob_goodput_ratio": _Family(Histogram, "Productive share of the time of jobs that ended.", {}, _RATIO_BUCKETS),
    "tpujob_progress_reports_total": _Family(
        Counter,
        "Progress reports of workers, by how they were answered.",
        {"result": (*_ANSWERS.values(), _STRANGER, _OTHER)},
    ),
    "controller_runtime_reconcile_total": _Family(
        Counter,
        "Passes over jobs, by result; requeue: the job had changed in the meantime.",
        {**_RECONCILER, "result": tuple(PassResult)},
    ),
    "controller_runtime_reconcile_errors_total": _Family(Counter, "Passes that ended with an error.", _RECONCILER),
    "controller_runtime_reconcile_time_seconds": _Family(
        Histogram, "How long a pass took.", _RECONCILER, _WORK_BUCKETS
    ),
    "controller_runtime_active_workers": _Family(Gauge, "Passes under way.", _RECONCILER),
    "workqueue_depth": _Family(Gauge, "Jobs that wait for a worker.", _QUEUE),
    "workqueue_adds_total": _Family(Counter, "Times that a job became due.", _QUEUE),
    "workqueue_retries_total": _Family(Counter, "Passes that failed and are tried again.", _QUEUE),
    "workqueue_queue_duration_seconds": _Family(
        Histogram, "How long a due job waited for a worker.", _QUEUE, _WORK_BUCKETS
    ),
    "workqueue_work_duration_seconds": _Family(Histogram, "How long a worker had a job.", _QUEUE, _WORK_BUCKETS),
    "workqueue_unfinished_work_seconds": _Family(Gauge, "Ages of all passes under way, added up.", _QUEUE),
    "workqueue_longest_running_processor_seconds": _Family(Gauge, "Age of the oldest pass under way.", _QUEUE),
    "rest_client_requests_total": _Family(
        Counter,
        "Requests to the API server, by HTTP status and method; <error>: no answer.",
        {"code": (*map(str, _CODES), _NO_ANSWER, _OTHER), "method": _VERBS},
    ),
    "rest_client_request_duration_seconds": _Family(
        Histogram,
        "How long the API server took to answer, without the wait for its turn.",
        {"verb": _VERBS},
        _REQUEST_BUCKETS,
    ),
    "leader_election_master_status": _Family(Gauge, "1 if this operator leads, else 0.", _QUEUE),
    "tpujob_event_loop_lag_seconds": _Family(
        Histogram, "How much later than asked the event loop woke up, measured once a second.", {}, _LAG_BUCKETS
    ),
    "tpujob_build_info": _Family(Gauge, "Always 1; the version is in the label.", {"version": (version(),)}),
}
_LAG_PERIOD_SECONDS = 1.0
MOST_NAMESPACES = 100
"""Each has some thirty series."""


class Metrics:
    """Counts what one operator process does. `clock`: monotonic seconds. `namespaces`: so many, the first ones that
    have jobs, get series of their own; the others share one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, namespaces: int = MOST_NAMESPACES) -> None:
        # The _created series would tell no more than the process's start time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._clock = clock
        self._metrics: dict[str, Any] = {}
        self._series: dict[tuple[str, ...], Any] = {}
        self._most_namespaces = namespaces
        self._namespaces: set[str] = set()
        self._states: dict[JobKey, str] = {}
        self._unready_since: dict[JobKey, float] = {}
        self._queued_at: dict[Hashable, float] = {}
        self._taken_at: dict[Hashable, float] = {}
        for name, family in _FAMILIES.items():
            buckets: dict[str, Any] = {"buckets": family.buckets} if family.buckets else {}
            self._metrics[name] = family.kind(name, family.help, family.labels, registry=self.registry, **buckets)
            self._begin_series(name, family.labels)
        ProcessCollector(registry=self.registry)
        self._series["tpujob_build_info", version()].set(1)
        self._compute("tpujob_longest_unready_seconds", lambda: max(self._ages(self._unready_since), default=0.0))
        self._compute("controller_runtime_active_workers", lambda: len(self._taken_at), _CONTROLLER)
        self._compute("workqueue_depth", lambda: len(self._queued_at), _CONTROLLER)
        self._compute("workqueue_unfinished_work_seconds", lambda: sum(self._ages(self._taken_at)), _CONTROLLER)
        self._compute(
            "workqueue_longest_running_processor_seconds",
            lambda: max(self._ages(self._taken_at), default=0.0),
            _CONTROLLER,
        )

    def _begin_series(self, name: str, labels: Mapping[str, tuple[str, ...]]) -> None:
        metric = self._metrics[name]
        for values in product(*labels.values()):
            self._series[name, *values] = metric.labels(*values) if values else metric

    def _namespace(self, key: JobKey) -> str:
        """Returns the label's value for the job's namespace."""
        if key.namespace not in self._namespaces:
            if len(self._namespaces) >= self._most_namespaces:
                return _OTHER_NAMESPACES
            self._namespaces.add(key.namespace)
            for name, family in _FAMILIES.items():
                if _NAMESPACE in family.labels:
                    self._begin_series(name, {**family.labels, _NAMESPACE: (key.namespace,)})
        return key.namespace

    def _compute(self, name: str, value: Callable[[], float], *labels: str) -> None:
        self._series[name, *labels].set_function(value)

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        self._series[name, *labels].inc(by)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        self._series[name, *labels].observe(value)

    def _ages(self, since: Mapping[Any, float]) -> list[float]:
        now = self._clock()
        return [now - at for at in since.values()]

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Returns all series as text, in the format that the Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    # The work queue and the passes, under the names of client-go and controller-runtime, which dashboards know.

    def key_queued(self, key: Hashable) -> None:
        """Counts a key that is due: it waits for a worker, or for the worker that has it at the moment."""
        self._count("workqueue_adds_total", _CONTROLLER)
        self._queued_at[key] = self._clock()

    def key_taken(self, key: Hashable) -> None:
        self._taken_at[key] = now = self._clock()
        self._observe("workqueue_queue_duration_seconds", now - self._queued_at.pop(key), _CONTROLLER)

    def key_done(self, key: Hashable) -> None:
        seconds = self._clock() - self._taken_at.pop(key)
        self._observe("workqueue_work_duration_seconds", seconds, _CONTROLLER)

    def key_retried(self) -> None:
        self._count("workqueue_retries_total", _CONTROLLER)

    def pass_ended(self, result: PassResult, seconds: float) -> None:
        self._count("controller_runtime_reconcile_total", _CONTROLLER, result)
        self._observe("controller_runtime_reconcile_time_seconds", seconds, _CONTROLLER)
        if result is PassResult.ERROR:
            self._count("controller_runtime_reconcile_errors_total", _CONTROLLER)

    def leads(self, *, leads: bool) -> None:
        """Records whether this process works; otherwise it waits for another one to stop."""
        self._series["leader_election_master_status", _CONTROLLER].set(int(leads))

    # Requests to the API server, under client-go's names, and reports to the progress service.

    def request_answered(self, method: str, status: int, seconds: float) -> None:
        """Counts an answer of the API server with this HTTP status; 0: no answer came. Watches are not counted."""
        code = _NO_ANSWER if status == 0 else str(status) if status in _CODES else _OTHER
        self._count("rest_client_requests_total", code, method)
        self._observe("rest_client_request_duration_seconds", seconds, method)

    def report_answered(self, status: int, *, is_known: bool) -> None:
        """Counts an answer of the progress service with this HTTP status. `is_known`: the sender's token was accepted,
        now or the last time."""
        is_stranger = not is_known and status in _OF_STRANGERS
        result = _STRANGER if is_stranger else _ANSWERS.get(status, _OTHER)
        self._count("tpujob_progress_reports_total", result)

    # The jobs.

    def jobs_listed(self, states: Mapping[JobKey, State | None]) -> None:
        """Records the states of all jobs that exist."""
        # The list also shows deletions that were missed.
        for key in self._states.keys() - states.keys():
            self.job_gone(key)
        for key, state in states.items():
            self.job_seen(key, state)

    def job_seen(self, key: JobKey, state: State | None, unready_seconds: float | None = None) -> None:
        """Records the job's state at the end of a pass; None before its first status. `unready_seconds`: how long its
        workers have not been ready, if that is known."""
        self._leave_state(key)
        self._states[key] = label = state or NEW
        self._count("tpujob_jobs", self._namespace(key), label)
        if label not in _UNREADY:
            self._unready_since.pop(key, None)
        elif unready_seconds is not None:
            self._unready_since[key] = self._clock() - unready_seconds
        else:
            self._unready_since.setdefault(key, self._clock())

    def job_gone(self, key: JobKey) -> None:
        self._leave_state(key)
        self._unready_since.pop(key, None)

    def _leave_state(self, key: JobKey) -> None:
        if state := self._states.pop(key, None):
            self._count("tpujob_jobs", self._namespace(key), state, by=-1)

    def status_written(self, key: JobKey, before: Status, after: Status) -> None:
        """Counts what happened between two statuses of a job. `after` has replaced `before`, which the resourceVersion
        proves. Only the operator that wrote it counts, so nothing is counted twice if the operator restarts or if two
        of them serve the same jobs."""
        namespace = self._namespace(key)
        if failed := transitions.failure(before, after):
            self._count("tpujob_failures_total", failed)
        for failure_class, count in transitions.restarts(before, after).items():
            self._count("tpujob_restarts_total", namespace, failure_class, by=count)
        for account, seconds in transitions.seconds_by_account(before, after).items():
            self._count("tpujob_goodput_seconds_total", account, by=seconds)
        for account, chip_seconds in transitions.chip_seconds_by_account(before, after).items():
            self._count("tpujob_chip_seconds_total", namespace, account, by=chip_seconds)
        for start in transitions.finished_starts(before, after):
            cause = "failure" if start.cause in set(FailureClass) else "other"
            self._count("tpujob_starts_total", cause)
            for phase, seconds in start.seconds.items():
                self._count("tpujob_start_seconds_total", cause, phase, by=seconds)
        if transitions.is_over_budget(after) and not transitions.is_over_budget(before):
            self._count("tpujob_chip_budgets_exceeded_total")
        if ready := transitions.readiness(before, after):
            had_failed, waited = ready
            self._observe("tpujob_recovery_seconds" if had_failed else "tpujob_gang_ready_seconds", waited)
        if (reason := transitions.finish(before, after)) is not None:
            self._count("tpujob_finished_total", reason if reason in _ENDS else _OTHER_END)
            if reason in _EXHAUSTED and after.last_failure:
                self._count("tpujob_restarts_exhausted_total", after.last_failure.failure_class)
        if (ratio := transitions.final_ratio(before, after)) is not None:
            self._observe("tpujob_goodput_ratio", ratio)

    async def watch_event_loop(self) -> None:
        """Measures the lag of the event loop until it is cancelled. A lag comes from blocking code or a starved
        process."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_PERIOD_SECONDS
            await asyncio.sleep(_LAG_PERIOD_SECONDS)
            self._observe("tpujob_event_loop_lag_seconds", max(0.0, loop.time() - due))


_BOUNDS = Bounds(connections=32)


@asynccontextmanager
async def serve_metrics(port: int, metrics: Metrics) -> AsyncIterator[None]:
    """Serves on `port` of every address, and measures the event loop, until the block ends. Raises OSError if the port
    is taken."""

    async def answer(request: web.Request) -> web.Response:
        body, content_type = metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    lag = asyncio.create_task(metrics.watch_event_loop(), name="event loop lag")
    try:
        async with serve_bounded(app, port, _BOUNDS):
            yield
    finally:
        lag.cancel()
        with suppress(asyncio.CancelledError):
            await lag
