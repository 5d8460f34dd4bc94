"""Whether this pod's service account gets a token, and reads and writes where the checkpoints go, and how fast."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from tpu_contract.run_spec import RunSpec
from tpu_contract.slice_check import SliceCheckLine, SliceSection
from tpu_trainer.checks.entry.places import find_places
from tpu_trainer.checks.slice.lines import CheckedHost, judge
from tpu_trainer.contract.errors import StorageError
from tpu_trainer.storage import open_store

_STORAGE = SliceSection.STORAGE
_SIZE = 32 << 20


def check_storage(spec: RunSpec, me: CheckedHost) -> Iterator[SliceCheckLine]:
    """Asks the metadata server, and writes, reads and deletes an object of 32 MiB."""
    if spec.checkpoint is None:
        yield judge(_STORAGE, "storage", None, "", advice="the job has no checkpoint.uri")
        return
    if spec.checkpoint.uri.startswith("gs://") and not os.environ.get("STORAGE_EMULATOR_HOST"):
        zone = find_places(spec).get("zone")
        advice = "let the pods reach the metadata server, which gives them their credentials"
        yield judge(_STORAGE, "metadata server", bool(zone), zone or "no answer", "the node's zone", advice)
    store, name = open_store(spec.checkpoint.uri), f"slice-check/{me.index}"
    data = os.urandom(_SIZE)
    try:
        writing = _seconds(lambda: store.put(name, data))
        received: list[bytes] = []
        reading = _seconds(lambda: received.append(store.read(name)))
        store.delete(name)
    except StorageError as error:
        yield judge(
            _STORAGE, "storage", False, str(error), "reads and writes", "give the pods this right (docs/gke.md)"
        )
        return
    advice = "the storage gave other bytes than it was sent: look at what lies between the pod and it"
    yield judge(_STORAGE, "storage", received[0] == data, f"{store.uri} reads and writes", "the same bytes", advice)
    for way, seconds in (("write", writing), ("read", reading)):
        speed = _SIZE / 1e6 / max(seconds, 1e-9)
        yield judge(_STORAGE, f"storage, {way}", True, f"{speed:.0f} MB/s", number=speed, unit="MB/s")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
