"""What the lower rungs of a ladder leave: checkpoints that only the job after them reads, and only until it has its
own."""

from __future__ import annotations

from tpu_trainer.checkpoint.commit import COMMIT
from tpu_trainer.storage.store import open_store


def remove_rungs(prefix: str) -> int:
    """Deletes all objects whose URI starts with `prefix`, .../NAME.rungs/UID-. Returns how many there were.

    Raises:
        StorageError: the storage refuses.
    """
    beside, folder, begins = prefix.rsplit("/", 2)
    store = open_store(beside, "checkpoint.rungs")
    # First what vouches for the rest, so that what is half deleted is not taken for whole.
    names = sorted(store.list(f"{folder}/{begins}"), key=lambda name: not name.endswith(f"/{COMMIT}"))
    for name in names:
        store.delete(name)
    return len(names)
