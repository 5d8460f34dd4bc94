"""Requests to the API server, under client-go's names. kopf's watches are its own and not among them."""

from prometheus_client import CollectorRegistry, Counter, Histogram

METHODS = ("GET", "POST", "PUT", "DELETE")
NO_ANSWER = "<error>"
OTHER = "other"
# All that an API server, or a proxy before it, is known to say.
_CODES = (200, 201, 202, 400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 422, 429, 500, 501, 502, 503, 504)
CODES = (*map(str, _CODES), NO_ANSWER, OTHER)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "rest_client_requests_total",
            "Requests to the API server, by HTTP status and method; <error>: no answer.",
            ["code", "method"],
            registry=registry,
        )
        self._seconds = Histogram(
            "rest_client_request_duration_seconds",
            "How long the API server took to answer, without the waiting for our own rate limit.",
            ["verb"],
            buckets=_SECONDS,
            registry=registry,
        )
        for method in METHODS:
            self._seconds.labels(method)
            for code in CODES:
                self._requests.labels(code, method)

    def answered(self, method: str, status: int, seconds: float) -> None:
        code = NO_ANSWER if status == 0 else str(status) if status in _CODES else OTHER
        self._requests.labels(code, method).inc()
        self._seconds.labels(method).observe(seconds)
