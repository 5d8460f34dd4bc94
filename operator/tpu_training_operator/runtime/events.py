"""Sends Kubernetes events about a job, which `kubectl describe` shows.

Nothing depends on them: everything important is in the status, too.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from datetime import datetime
from itertools import count

from tpu_training_operator.api.constants import API_VERSION, KIND, MANAGER
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.objects.actions import Event
from tpu_training_operator.kube.cluster import Cluster, Object
from tpu_training_operator.kube.errors import ApiError
from tpu_training_operator.kube.turns import flow

log = logging.getLogger(__name__)

# In bytes.
_LONGEST_NOTE = 1024
# An event says what was done (action) and why (reason). All of ours are done by reconciling.
_ACTION = "Reconcile"
# Each event that waits keeps its job in memory, some kilobytes.
_MOST_WAITING = 1000
_AT_ONCE = 4
# Distinguishes events of the same moment.
_numbers = count()


async def send_events(cluster: Cluster, events: Sequence[Event], job: Object, now: datetime) -> bool:
    """Sends the events. Returns False if one of them could not be sent."""
    are_sent = True
    for event in events:
        try:
            await cluster.create(event_body(event, job, now))
        except ApiError as error:
            are_sent = False
            log.warning("event %s could not be sent: %s", event.reason, error, extra={"job": _key(job)})
    return are_sent


class EventSender:
    """Sends events in separate tasks, so that passes do not wait for them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._waiting: asyncio.Queue[tuple[Event, Object, datetime]] = asyncio.Queue(_MOST_WAITING)

    def send(self, events: Sequence[Event], job: Object, now: datetime) -> None:
        """Sends the events soon, or drops them if a thousand wait already."""
        for event in events:
            try:
                self._waiting.put_nowait((event, job, now))
            except asyncio.QueueFull:
                log.warning("event %s is dropped: too many events are waiting", event.reason, extra={"job": _key(job)})

    async def run(self) -> None:
        """Runs until it is cancelled; events that wait then are lost."""
        # Events take turns with the batches of jobs.
        with flow():
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_AT_ONCE):
                    tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            event, job, now = await self._waiting.get()
            try:
                await send_events(self._cluster, (event,), job, now)
            except Exception:
                log.exception("event %s could not be sent", event.reason, extra={"job": _key(job)})


def _key(job: Object) -> str:
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


def _name(job: str, now: datetime) -> str:
    """Returns names that sort in the order of the events. kubectl describe sorts by a field that events of this API
    version must not have, and then by name."""
    nanoseconds = int(now.timestamp() * 1e6) * 1000
    return f"{job}.{nanoseconds:016x}{next(_numbers) % 2**16:04x}{secrets.token_hex(4)}"


def event_body(event: Event, job: Object, now: datetime) -> Object:
    """Returns the events.k8s.io/v1 object for `event`, regarding `job`."""
    metadata = job["metadata"]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": _name(metadata["name"], now), "namespace": metadata["namespace"]},
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": MANAGER,
        "reportingInstance": os.environ.get("HOSTNAME", MANAGER)[:128],
        "action": _ACTION,
        "reason": event.reason,
        "type": "Warning" if event.warning else "Normal",
        "note": plain(event.message).encode()[:_LONGEST_NOTE].decode(errors="ignore"),
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }
