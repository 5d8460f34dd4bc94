"""How workers' progress reports were answered."""

from prometheus_client import CollectorRegistry, Counter

from tpu_training_operator.runtime.observers import ReportObserver

_RESULTS = {
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
_OTHER = "other"


class ReportMetrics(ReportObserver):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._reports = Counter(
            "tpujob_progress_reports_total",
            "Progress reports of workers, by how they were answered.",
            ["result"],
            registry=registry,
        )
        for result in (*_RESULTS.values(), _OTHER):
            self._reports.labels(result)

    def report_answered(self, status: int) -> None:
        self._reports.labels(_RESULTS.get(status, _OTHER)).inc()
