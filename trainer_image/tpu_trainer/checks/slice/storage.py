"""Whether this pod's service account gets a token, and reads and writes where the checkpoints go, and how fast."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tpu_contract.run_spec import RunSpec
from tpu_contract.slice_check import SliceCheckLine, SliceSection
from tpu_trainer.checks.entry.places import find_places
from tpu_trainer.checks.slice.lines import CheckedHost, judge, timed
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.storage import open_store

_STORAGE = SliceSection.STORAGE
_SIZE = 32 << 20


def check_storage(spec: RunSpec, me: CheckedHost) -> Iterator[SliceCheckLine]:
    """Asks the metadata server, and writes, reads and deletes an object of 32 MiB."""
    if spec.checkpoint is None:
        yield judge(_STORAGE, "storage", None, advice="the job has no checkpoint.uri")
        return
    if spec.checkpoint.uri.startswith("gs://") and not os.environ.get("STORAGE_EMULATOR_HOST"):
        zone = find_places(spec).get("zone")
        advice = "let the pods reach the metadata server, which gives them their credentials"
        yield judge(_STORAGE, "metadata server", bool(zone), zone or "no answer", "the node's zone", advice)
    store, name = open_store(spec.checkpoint.uri), f"slice-check/{me.index}"
    data, seconds = os.urandom(_SIZE), dict[str, float]()
    try:
        with timed(seconds, "write"):
            store.put(name, data)
        with timed(seconds, "read"):
            received = store.read(name)
        store.delete(name)
    except StorageError as error:
        advice = "give the pods this right (docs/gke.md)"
        yield judge(_STORAGE, "storage", False, str(error), "reads and writes", advice)
        return
    advice = "the storage gave other bytes than it was sent: look at what lies between the pod and it"
    yield judge(_STORAGE, "storage", received == data, f"{store.uri} reads and writes", "the same bytes", advice)
    for way, needed in seconds.items():
        speed = _SIZE / 1e6 / max(needed, 1e-9)
        yield judge(_STORAGE, f"storage, {way}", True, f"{speed:.0f} MB/s", number=speed, unit="MB/s")
