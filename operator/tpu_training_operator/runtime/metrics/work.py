"""The work queue and the passes, under the names of client-go and controller-runtime: dashboards know those."""

from collections.abc import Callable, Hashable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tpu_training_operator.runtime.observers import PassResult, WorkObserver

CONTROLLER = "tputrainingjob"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class WorkMetrics(WorkObserver):
    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._added_at: dict[Hashable, float] = {}
        self._taken_at: dict[Hashable, float] = {}
        self._register_queue(registry)
        self._register_passes(registry)

    def _register_queue(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(name, text, ["name"], registry=registry).labels(CONTROLLER).set_function(value)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["name"], registry=registry).labels(CONTROLLER)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, ["name"], buckets=_SECONDS, registry=registry).labels(CONTROLLER)

        gauge("workqueue_depth", "Jobs that wait for a worker.", lambda: len(self._added_at))
        gauge(
            "workqueue_unfinished_work_seconds",
            "Ages of all passes under way, added up.",
            lambda: sum(self._ages()),
        )
        gauge(
            "workqueue_longest_running_processor_seconds",
            "Age of the oldest pass under way.",
            lambda: max(self._ages(), default=0.0),
        )
        self._adds = counter("workqueue_adds_total", "Times that a job became due.")
        self._retries = counter("workqueue_retries_total", "Passes that failed and are tried again.")
        self._waited = histogram("workqueue_queue_duration_seconds", "How long a due job waited for a worker.")
        self._worked = histogram("workqueue_work_duration_seconds", "How long a worker had a job.")

    def _register_passes(self, registry: CollectorRegistry) -> None:
        self._passes = Counter(
            "controller_runtime_reconcile_total",
            "Passes over jobs, by result; requeue: the job had changed meanwhile.",
            ["controller", "result"],
            registry=registry,
        )
        for result in PassResult:
            self._passes.labels(CONTROLLER, result)
        self._errors = Counter(
            "controller_runtime_reconcile_errors_total",
            "Passes that ended with an error.",
            ["controller"],
            registry=registry,
        ).labels(CONTROLLER)
        self._seconds = Histogram(
            "controller_runtime_reconcile_time_seconds",
            "How long a pass took.",
            ["controller"],
            buckets=_SECONDS,
            registry=registry,
        ).labels(CONTROLLER)
        active = Gauge("controller_runtime_active_workers", "Passes under way.", ["controller"], registry=registry)
        active.labels(CONTROLLER).set_function(lambda: len(self._taken_at))

    def _ages(self) -> list[float]:
        now = self._clock()
        return [now - taken for taken in self._taken_at.values()]

    def added(self, key: Hashable) -> None:
        self._adds.inc()
        self._added_at[key] = self._clock()

    def taken(self, key: Hashable) -> None:
        now = self._clock()
        self._waited.observe(now - self._added_at.pop(key))
        self._taken_at[key] = now

    def done(self, key: Hashable) -> None:
        self._worked.observe(self._clock() - self._taken_at.pop(key))

    def retried(self) -> None:
        self._retries.inc()

    def passed(self, result: PassResult, seconds: float) -> None:
        self._passes.labels(CONTROLLER, result).inc()
        self._seconds.observe(seconds)
        if result is PassResult.ERROR:
            self._errors.inc()
