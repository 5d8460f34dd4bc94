"""A progress service with a fake cluster instead of an API server, for the tests of the service."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from tests.unit.reviewing_cluster import reviewing_cluster
from tpu_training_operator.domain.cluster_state.worker_reports import Inbox
from tpu_training_operator.kube.cluster import JobKey
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.progress.server import ProgressServer
from tpu_training_operator.runtime.progress.tokens import Reviewer

KEY = JobKey("default", "digits")
NOW = datetime(2026, 1, 15, 12, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
PROGRESS = "/apis/tpu-operator.dev/v1alpha1/namespaces/default/tputrainingjobs/digits/progress"
TRAINER_STATUS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/digits/status"
GOOD = {"phase": "Training", "step": 7}
# A test that fails ends then; none waits for so long.
SECONDS = 20
BEARER = {"Authorization": "Bearer token"}


class Desk:
    """The service, the cluster behind it, and what came of the reports. Its time stands still until it is set."""

    def __init__(self) -> None:
        self.cluster = reviewing_cluster()
        self.now = NOW
        self.inboxes = Inboxes(lambda: self.now)
        self.hints: list[JobKey] = []
        self.seconds = 0.0
        self.service = ProgressServer(
            reviewer=Reviewer(self.cluster, lambda: self.seconds),
            inboxes=self.inboxes,
            enqueue=lambda key, seconds: self.hints.append(key),
            clock=lambda: NOW,
            seconds=lambda: self.seconds,
        )

    @contextmanager
    def api_server_held(self) -> Iterator[None]:
        """Within the block the API server answers nothing."""
        is_over = asyncio.Event()
        self.cluster.hooks["*"] = is_over.wait
        try:
            yield
        finally:
            is_over.set()

    @property
    def inbox(self) -> Inbox:
        return self.inboxes.of(KEY)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - a few rounds of the loop, and nobody tells
            await asyncio.sleep(0)
