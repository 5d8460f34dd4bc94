"""Stores packed code for the workers: in the job's bucket, on a shared volume, or in a Secret."""

import base64
import os
import secrets
from pathlib import Path
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.constants import LARGEST_SECRET
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.model import CODE_SCHEME
from tpu_training_operator.api.trainer import Code
from tpu_training_operator.cli.code.packing import PackedCode, largest, size_text
from tpu_training_operator.cli.common.errors import CommandError, WrongOption
from tpu_training_operator.domain.job.recipe.checkpointing import folder

IN_CLUSTER = "secret"
# Enough digits of the hash to distinguish the archives of one job.
_SHOWN_OF_HASH = 10


class NoPlace(CommandError):
    """The packed code cannot be put where workers would find it."""


def place_of(packed: PackedCode, job: TPUTrainingJob, code_to: str | None) -> str:
    """Returns the value of `trainer.code.uri`. The default is the job's folder in a bucket, which takes any size, and
    else a Secret; a directory of the workers may not exist on this machine. Raises NoPlace for code that is too large
    for a Secret."""
    checkpoint = job.spec.checkpoint
    if code_to is None and checkpoint is not None and checkpoint.uri.startswith("gs://"):
        code_to = folder(job, checkpoint)
    if code_to is not None and code_to != IN_CLUSTER:
        if not code_to.startswith(("gs://", "/")):
            raise WrongOption(f"--code-to {code_to}: expected gs://bucket/path, an absolute path, or {IN_CLUSTER}")
        return f"{code_to.rstrip('/')}/code-{packed.sha256}.tar.gz"
    size = len(packed.archive)
    if size > LARGEST_SECRET:
        raise NoPlace(
            f"the packed code has {size} bytes ({size_text(size)}), and a Secret holds {LARGEST_SECRET} (1 MiB,"
            " counted before base64): set checkpoint.uri to gs://bucket/path, or name another bucket with"
            f" --code-to gs://bucket/path; {largest(packed.sizes)}"
        )
    return f"{CODE_SCHEME}{job.name}-code-{packed.sha256[:_SHOWN_OF_HASH]}"


def put(archive: bytes, uri: str) -> None:
    """Writes the archive to a bucket or a directory. Raises NoPlace."""
    try:
        if uri.startswith("gs://"):
            _put_into_bucket(archive, uri)
        else:
            _put_into_directory(archive, Path(uri))
    except ImportError as error:
        raise NoPlace(
            f"{uri}: writing to a bucket needs gcsfs: pip install gcsfs, or add"
            f" --code-to {IN_CLUSTER} for code of at most 1 MiB"
        ) from error
    except Exception as error:
        # Each file system raises its own errors for denied access and lost connections.
        reason = (str(error).strip().splitlines() or [""])[-1]
        raise NoPlace(f"{uri}: the code cannot be written there: {type(error).__name__}: {reason}") from error


def holds_checkpoints(job: TPUTrainingJob, code: Code | None) -> bool:
    """Returns whether the job's folder has checkpoints already; False where that cannot be seen from here. A bucket is
    asked only if `code` has just been written to one: looking for credentials may take seconds."""
    checkpoint = job.spec.checkpoint
    if checkpoint is None:
        return False
    place = folder(job, checkpoint)
    try:
        if not place.startswith("gs://"):
            return any(Path(place).glob("step-*"))
        return code is not None and code.uri.startswith("gs://") and bool(_buckets().glob(f"{place}/step-*"))
    except Exception:
        # Each file system raises its own errors, and a hint is worth none of them.
        return False


def _buckets() -> Any:
    from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]

    # An emulator needs no credentials, and looking for Google's would take seconds.
    token = "anon" if os.environ.get("STORAGE_EMULATOR_HOST") else None
    return GCSFileSystem(token=token, use_listings_cache=False, skip_instance_cache=True)


def _put_into_bucket(archive: bytes, uri: str) -> None:
    _buckets().pipe_file(uri.removeprefix("gs://"), archive)


def _put_into_directory(archive: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A unique name: two people may submit the same code at once.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        unfinished.write_bytes(archive)
        unfinished.replace(path)
    finally:
        # After a failed write, half an archive would still fill the disk.
        unfinished.unlink(missing_ok=True)


def secret(name: str, packed: PackedCode, job: dict[str, Any]) -> dict[str, Any]:
    """Makes the Secret, which `job`, as stored, owns. Unlike a ConfigMap, it is not readable with role `view`."""
    metadata = job["metadata"]
    owner = {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": {constants.LABEL_JOB_NAME: metadata["name"]},
            "ownerReferences": [owner],
        },
        "immutable": True,
        "data": {constants.CODE_ARCHIVE_KEY: base64.b64encode(packed.archive).decode()},
    }
