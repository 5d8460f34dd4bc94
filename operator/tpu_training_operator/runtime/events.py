"""Kubernetes events about a job, as `kubectl describe` shows them.

Nothing depends on them: whatever matters is in the status, too.
"""

import logging
import os
import secrets
from collections.abc import Sequence
from datetime import datetime

from tpu_training_operator.api.constants import API_VERSION, KIND, MANAGER
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.actions import Event
from tpu_training_operator.kube.cluster import Cluster, Object
from tpu_training_operator.kube.errors import ApiError

log = logging.getLogger(__name__)

# In bytes.
_LONGEST_NOTE = 1024
# An event says what was done (action) and why (reason). All of ours are done by reconciling.
_ACTION = "Reconcile"


async def send_events(cluster: Cluster, events: Sequence[Event], job: Object, now: datetime) -> bool:
    """False if one of them could not be sent."""
    sent = True
    for event in events:
        try:
            await cluster.create(event_body(event, job, now))
        except ApiError as error:
            sent = False
            key = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
            log.warning("event %s could not be sent: %s", event.reason, error, extra={"job": key})
    return sent


def event_body(event: Event, job: Object, now: datetime) -> Object:
    """The events.k8s.io/v1 object for `event`, regarding `job`."""
    metadata = job["metadata"]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(8)}", "namespace": metadata["namespace"]},
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
