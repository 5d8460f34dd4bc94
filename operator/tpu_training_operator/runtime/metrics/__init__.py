"""The operator's Prometheus metrics: what each is, `docs/metrics.md` says. Built by `main`, served by `server`.

Every series there will ever be exists from the start, at 0. That bounds their number, keeps the names of jobs out, and
lets rate() see the first event: an increase from nothing is one that Prometheus does not count.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from tpu_training_operator.runtime.metrics.jobs import JobMetrics
from tpu_training_operator.runtime.metrics.process import LoopLag, register_build_info
from tpu_training_operator.runtime.metrics.reports import ReportMetrics
from tpu_training_operator.runtime.metrics.requests import RequestMetrics
from tpu_training_operator.runtime.metrics.work import WorkMetrics


class Metrics:
    """An observer for each part of the operator, and what they have counted. `clock` counts seconds, from anywhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Half as many series again, one per counter, which say no more than the process's start time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.work = WorkMetrics(self.registry, clock)
        self.requests = RequestMetrics(self.registry)
        self.jobs = JobMetrics(self.registry, clock)
        self.reports = ReportMetrics(self.registry)
        self.loop_lag = LoopLag(self.registry)
        register_build_info(self.registry)
        ProcessCollector(registry=self.registry)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All of them as text, in the format that the Accept header asks for, and that format's content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
