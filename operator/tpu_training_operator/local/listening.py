"""The progress service on this machine: workers of a local run report as they do in a cluster. Entered by `local.run`.

The same server, TLS, review of tokens and inbox; only the authority lasts no longer than the run, and the port is open
to this machine alone.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from tpu_training_operator.domain.report import Reporting
from tpu_training_operator.kube.cluster import Cluster, JobKey
from tpu_training_operator.runtime.inbox import Inboxes
from tpu_training_operator.runtime.progress.certificates import new_authority
from tpu_training_operator.runtime.progress.reviewer import Reviewer
from tpu_training_operator.runtime.progress.server import ProgressService, serve
from tpu_training_operator.runtime.progress.tls import server_tls

_HOST = "localhost"
_ADDRESS = "127.0.0.1"


@asynccontextmanager
async def listening(cluster: Cluster, inboxes: Inboxes, hint: Callable[[JobKey], None]) -> AsyncIterator[Reporting]:
    """Take in reports until the end of the block. `hint`: called for a job that has something new in its inbox."""
    authority = new_authority(_HOST, _now())
    service = ProgressService(Reviewer(cluster, time.monotonic), inboxes, hint, _now, time.monotonic)
    async with server_tls(authority, (_HOST,), _now) as tls, serve(service, 0, tls, _ADDRESS) as port:
        yield Reporting(f"https://{_HOST}:{port}", authority.pem.certificate.decode())


def _now() -> datetime:
    return datetime.now(UTC)
