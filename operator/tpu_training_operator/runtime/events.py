"""Kubernetes events about a job: what `kubectl describe` shows. Sent by the reconciler after the status write.

Nothing depends on them; whatever matters is in the status, too.
"""

import os
import secrets
from datetime import datetime
from typing import Any

from tpu_training_operator.api.constants import API_VERSION, KIND, MANAGER
from tpu_training_operator.api.text import plain
from tpu_training_operator.domain.actions import Event

# In bytes.
_LONGEST_NOTE = 1024
# An event says what was done (action) and why (reason); these are our actions.
_ACTION = "Reconcile"


def event_body(event: Event, job: dict[str, Any], now: datetime) -> dict[str, Any]:
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
