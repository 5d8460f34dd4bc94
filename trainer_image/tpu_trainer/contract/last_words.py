"""A host's termination message: the file that the kubelet copies into the pod's status."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

from tpu_trainer.contract.outcome import Outcome, is_more_telling, termination_message
from tpu_trainer.contract.protocol import ENV_TERMINATION_LOG


def leave_words(outcome: Outcome, *, first: bool, path: str | None = None) -> None:
    """Writes the host's termination message, unless another process of this host has left more telling words.

    `first`: the host's first process, whose loss and metrics are the ones that are reported. `path`: the file, by
    default the one that the environment names, if it does.
    """
    path = path or os.environ.get(ENV_TERMINATION_LOG)
    if not path:
        return
    try:
        _write(Path(path), outcome, first)
    except OSError as error:
        print(f"{ENV_TERMINATION_LOG} {path}: cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def _write(path: Path, outcome: Outcome, first: bool) -> None:
    # In place and under a lock: in a pod the path is a mounted file, and all processes of the host share it.
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        said = _outcome_name(file.read())
        if is_more_telling(said, outcome.code) or (said == outcome.code.name and not first):
            return
        file.truncate(0)
        file.write(termination_message(outcome))


def _outcome_name(message: bytes) -> str | None:
    try:
        document = json.loads(message)
    except ValueError:
        return None
    return document.get("outcome") if isinstance(document, dict) else None
