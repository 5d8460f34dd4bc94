"""Objects in a directory or a bucket: checkpoints and reports."""

from __future__ import annotations

import re
from pathlib import Path

from tpu_trainer.contract.errors import BadSpecError
from tpu_trainer.storage.store import DirectoryStore, ObjectStore

_BUCKET = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/(.+)", re.DOTALL)


def open_store(uri: str, setting: str = "checkpoint.uri") -> ObjectStore:
    """Returns the store at `uri`, without accessing it yet. `setting`: the field of the run spec that holds the URI.

    Raises:
        BadSpecError: it is neither an absolute path nor gs://bucket/path.
    """
    in_bucket = _BUCKET.fullmatch(uri.rstrip("/"))
    if in_bucket:
        # Imported here: a run without a bucket should neither need the cloud's client nor wait for its import.
        from tpu_trainer.storage.bucket_store import BucketStore

        return BucketStore(*in_bucket.groups())
    if uri.startswith("/"):
        return DirectoryStore(Path(uri))
    raise BadSpecError(f'{setting}: "gs://bucket/path" or the absolute path of a directory, got {uri!r}')
