"""The operator's three ports in a process of their own, for strangers.

Writes the certificate of its authority into the folder FOLDER, then prints the three ports as JSON, and serves until it
is killed.
"""

import asyncio
import gc
import json
import os
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

from tests.cluster.ports import free_port
from tests.unit.progress_desk import Desk
from tpu_training_operator.runtime.health import serve_health
from tpu_training_operator.runtime.metrics import Metrics, serve_metrics
from tpu_training_operator.runtime.progress.pki import new_authority, server_tls
from tpu_training_operator.runtime.progress.server import serve

SERVICE_HOST = "operator.tpu-system.svc"

FOLDER = "TEST_PORTS"
"""The variable with the folder."""

IMPORTS = tuple(
    f"tpu_training_operator.runtime.{module}" for module in ("health", "metrics", "progress.pki", "progress.server")
)
"""Most of what the process imports."""


async def main(directory: Path) -> None:
    authority = new_authority("progress", datetime.now(UTC))
    (directory / "ca.crt").write_bytes(authority.pem.certificate)
    metrics_port = free_port()
    async with AsyncExitStack() as stack:
        tls = await stack.enter_async_context(server_tls(authority, (SERVICE_HOST,), lambda: datetime.now(UTC)))
        ports = {
            "progress": await stack.enter_async_context(serve(Desk().service, 0, tls)),
            "health": await stack.enter_async_context(serve_health(0, dict)),
            "metrics": metrics_port,
        }
        await stack.enter_async_context(serve_metrics(metrics_port, Metrics()))
        print(json.dumps(ports), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    # As in the operator, whose passes leave millions of objects behind that need no collector.
    gc.freeze()
    gc.set_threshold(20_000)
    asyncio.run(main(Path(os.environ[FOLDER])))
