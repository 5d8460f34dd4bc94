"""The progress service on this machine: workers of a local run report as they do in a cluster.

The same server, TLS, token review and inboxes. Only the authority lasts no longer than the run, and the port is open to
this machine alone.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from tpu_training_operator.domain.report import Reporting
from tpu_training_operator.kube.cluster import Cluster, JobKey
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.progress.pki import new_authority, server_tls
from tpu_training_operator.runtime.progress.server import ProgressService, serve
from tpu_training_operator.runtime.progress.tokens import Reviewer

_HOST = "localhost"
_ADDRESS = "127.0.0.1"


@asynccontextmanager
async def listening(
    cluster: Cluster, inboxes: Inboxes, enqueue: Callable[[JobKey, float], None]
) -> AsyncIterator[Reporting]:
    """Receive reports until the block ends. `enqueue` asks for a pass over a job within so many seconds."""
    authority = new_authority(_HOST, _now())
    service = ProgressService(Reviewer(cluster, time.monotonic), inboxes, enqueue, _now, time.monotonic)
    async with server_tls(authority, (_HOST,), _now) as tls, serve(service, 0, tls, _ADDRESS) as port:
        yield Reporting(f"https://{_HOST}:{port}", authority.pem.certificate.decode())


def _now() -> datetime:
    return datetime.now(UTC)
